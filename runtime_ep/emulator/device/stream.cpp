#include "device/stream.h"

#include "control/entry_point.h"
#include "control/settings.h"

namespace ascend_emulator {

Stream::Stream() : worker_([this] { work(); }) {}

Stream::~Stream() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    queued_.notify_one();
    worker_.join();
}

void Stream::enqueue(std::unique_ptr<Task> task) {
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        ++enqueued_;
    }
    queued_.notify_one();
}

bool Stream::synchronise(std::optional<std::chrono::milliseconds> patience) {
    std::unique_lock lock(mutex_);
    const std::uint64_t target = enqueued_;
    const auto reached = [&] {
        return completed_ >= target;
    };
    if (patience) {
        if (!finished_.wait_for(lock, *patience, reached)) {
            return false;
        }
    } else {
        finished_.wait(lock, reached);
    }
    if (error_) {
        const Error error = *std::exchange(error_, std::nullopt);
        throw Failure{error.code, error.sentence};
    }
    return true;
}

void Stream::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        queued_.wait(lock, [&] { return closing_ || !tasks_.empty(); });
        if (tasks_.empty()) {
            return;
        }
        std::unique_ptr<Task> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        std::optional<Error> error;
        if (const auto delay = settings().delay_us; delay > 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(delay));
        }
        try {
            task->run();
        } catch (const Failure& failure) {
            error = Error{failure.code, failure.sentence};
        }
        // Its leases end before anybody learns that it is done, so that the memory can be freed at once.
        task.reset();
        lock.lock();
        ++completed_;
        if (error && !error_) {
            error_ = std::move(error);
        }
        finished_.notify_all();
    }
}

void Event::State::wait(std::uint64_t recording) {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return completed >= recording; });
}

void Event::record(Stream& stream) {
    std::uint64_t recording = 0;
    {
        const std::lock_guard lock(state_->mutex);
        recording = ++state_->recorded;
    }
    stream.enqueue([state = state_, recording] {
        {
            const std::lock_guard lock(state->mutex);
            state->completed = std::max(state->completed, recording);
        }
        state->reached.notify_all();
    });
}

void Event::block(Stream& stream) const {
    std::uint64_t recording = 1;
    {
        const std::lock_guard lock(state_->mutex);
        recording = std::max(recording, state_->recorded);
    }
    stream.enqueue([state = state_, recording] { state->wait(recording); });
}

void Event::synchronise() const {
    std::uint64_t recording = 0;
    {
        const std::lock_guard lock(state_->mutex);
        recording = state_->recorded;
    }
    state_->wait(recording);
}

bool Event::complete() const {
    const std::lock_guard lock(state_->mutex);
    return state_->completed >= state_->recorded;
}

Registry<Stream>& streams() {
    static auto& registry = *new Registry<Stream>("stream");
    return registry;
}

Registry<Event>& events() {
    static auto& registry = *new Registry<Event>("event");
    return registry;
}

} // namespace ascend_emulator
