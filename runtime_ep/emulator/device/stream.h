// Streams: queues of tasks that a thread of their own works through, and events that mark a place in one.
#pragma once

#include "control/registry.h"

#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace ascend_emulator {

// Something that a stream does; it throws `Failure` when the device fails at it.
class Task {
  public:
    virtual ~Task() = default;
    virtual void run() = 0;
};

class Stream {
  public:
    Stream();
    // Works off what is still queued.
    ~Stream();

    void enqueue(std::unique_ptr<Task> task);

    template<std::invocable Body>
    void enqueue(Body body) {
        struct BodyTask final : Task {
            explicit BodyTask(Body&& taken) : body(std::move(taken)) {}
            void run() override { body(); }
            Body body;
        };
        enqueue(std::unique_ptr<Task>(std::make_unique<BodyTask>(std::move(body))));
    }

    // Waits for all that is queued now; false when `patience` ends first. Throws what a task failed with since the last
    // call.
    bool synchronise(std::optional<std::chrono::milliseconds> patience = std::nullopt);

  private:
    struct Error {
        std::int32_t code;
        std::string sentence;
    };

    void work();

    std::mutex mutex_;
    std::condition_variable queued_;
    std::condition_variable finished_;
    std::deque<std::unique_ptr<Task>> tasks_;
    std::uint64_t enqueued_ = 0;
    std::uint64_t completed_ = 0;
    bool closing_ = false;
    std::optional<Error> error_;
    std::thread worker_;
};

// A place in a stream. Recording it again moves it; who waits for it waits for the last recording.
class Event {
  public:
    void record(Stream& stream);
    // Makes `stream` wait, for the first recording if there was none yet.
    void block(Stream& stream) const;
    void synchronise() const;
    bool complete() const;

  private:
    // Outlives the event while a stream refers to it.
    struct State {
        std::mutex mutex;
        std::condition_variable reached;
        std::uint64_t recorded = 0;
        std::uint64_t completed = 0;

        void wait(std::uint64_t recording);
    };

    std::shared_ptr<State> state_ = std::make_shared<State>();
};

Registry<Stream>& streams();
Registry<Event>& events();

} // namespace ascend_emulator
