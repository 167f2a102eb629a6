// The execution provider of one session.
#pragma once

#include "ep/device.h"
#include "ep/weights.h"
#include "ort/abi.h"

#include <cstddef>
#include <optional>
#include <set>
#include <string>

namespace ep {

// The options of a session, "ep.ascendexecutionprovider.<name>" among its configuration entries.
struct Options {
    bool require_npu = false; // a node of the domain that cannot run on the NPU is an error

    // Throws for an option that there is not, and for a value that it cannot have.
    static Options of(const ort::OrtSessionOptions* session);
};

class Provider final : public ort::OrtEp {
  public:
    Provider(Device& device, const Options& options, const ort::OrtLogger* logger);
    ~Provider();
    Provider(const Provider&) = delete;
    Provider& operator=(const Provider&) = delete;

  private:
    void claim(const ort::OrtGraph* graph, ort::OrtEpGraphSupportInfo* support);
    ort::OrtNodeComputeInfo* compile(const ort::OrtGraph* graph, const ort::OrtNode* fused);
    void report_decline(const std::string& sentence);
    // Under require_npu: throws what GetCapability failed with, which the runtime only logs.
    void require_capability() const;

    static const char* get_name(const ort::OrtEp* self) noexcept;
    static ort::OrtStatus*
    get_capability(ort::OrtEp* self, const ort::OrtGraph* graph, ort::OrtEpGraphSupportInfo* support) noexcept;
    static ort::OrtStatus* compile(
        ort::OrtEp* self, const ort::OrtGraph** graphs, const ort::OrtNode** fused, std::size_t count,
        ort::OrtNodeComputeInfo** nodes, ort::OrtNode** context_nodes
    ) noexcept;
    static void release_nodes(ort::OrtEp* self, ort::OrtNodeComputeInfo** nodes, std::size_t count) noexcept;
    static ort::OrtStatus* on_run_start(ort::OrtEp* self, const ort::OrtRunOptions* options) noexcept;
    static ort::OrtStatus*
    create_allocator(ort::OrtEp* self, const ort::OrtMemoryInfo* info, ort::OrtAllocator** allocator) noexcept;
    static ort::OrtStatus*
    create_stream(ort::OrtEp* self, const ort::OrtMemoryDevice* memory, ort::OrtSyncStreamImpl** stream) noexcept;
    static ort::OrtStatus* get_kernel_registry(ort::OrtEp* self, const ort::OrtKernelRegistry** registry) noexcept;
    static ort::OrtStatus* is_concurrent_run_supported(ort::OrtEp* self, bool* supported) noexcept;
    static ort::OrtStatus* sync(ort::OrtEp* self) noexcept;

    Device& device_;
    Options options_;
    const ort::OrtLogger* logger_;
    Weights weights_;
    std::set<std::string> reported_;
    std::optional<std::string> capability_failure_;
};

} // namespace ep
