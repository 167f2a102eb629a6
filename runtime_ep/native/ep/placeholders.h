// Names for the operators in models that have no bodies for them, so that such models load. They compute nothing: a
// node that the provider does not claim fails with the reason.
//
// A registered operator takes precedence over a body and switches it off, so that this is only on offer on request.
#pragma once

#include "operators/operator.h"
#include "ort/abi.h"

#include <deque>

namespace ep {

class Placeholder final : public ort::OrtCustomOp {
  public:
    explicit Placeholder(const operators::Operator& known);

    const operators::Operator& known() const { return known_; }

  private:
    const operators::Operator& known_;
};

class Placeholders {
  public:
    Placeholders();
    ~Placeholders();
    Placeholders(const Placeholders&) = delete;
    Placeholders& operator=(const Placeholders&) = delete;

    ort::OrtCustomOpDomain* domain() const { return domain_; }

  private:
    std::deque<Placeholder> operators_; // the domain points at them
    ort::OrtCustomOpDomain* domain_ = nullptr;
};

} // namespace ep
