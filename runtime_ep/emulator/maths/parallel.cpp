#include "maths/parallel.h"

#include "control/settings.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ascend_emulator {
namespace {

// One loop: its pieces are taken one after the other by whoever has time.
struct Loop {
    std::int64_t count;
    std::int64_t grain;
    const std::function<void(std::int64_t, std::int64_t)>* body;
    std::atomic<std::int64_t> next{0};
    std::atomic<std::int64_t> done{0};
    std::mutex mutex;
    std::condition_variable finished;
    std::exception_ptr failure;

    std::int64_t pieces() const { return (count + grain - 1) / grain; }

    void work() {
        for (std::int64_t piece; (piece = next.fetch_add(1)) < pieces();) {
            try {
                (*body)(piece* grain, std::min(count, (piece + 1) * grain));
            } catch (...) { // whatever it is, it belongs to the thread that waits
                const std::lock_guard lock(mutex);
                failure = std::current_exception();
            }
            if (done.fetch_add(1) + 1 == pieces()) {
                const std::lock_guard lock(mutex);
                finished.notify_all();
            }
        }
    }

    void wait() {
        std::unique_lock lock(mutex);
        finished.wait(lock, [&] { return done.load() == pieces(); });
        if (failure) {
            std::rethrow_exception(failure);
        }
    }
};

// Threads that help with the loops of all streams. They never end: the process does.
class Helpers {
  public:
    static Helpers& instance() {
        static auto& helpers = *new Helpers;
        return helpers;
    }

    std::size_t count() const { return threads_.size(); }

    void help(const std::shared_ptr<Loop>& loop) {
        {
            const std::lock_guard lock(mutex_);
            loops_.push_back(loop);
        }
        offered_.notify_all();
    }

    void withdraw(const std::shared_ptr<Loop>& loop) {
        const std::lock_guard lock(mutex_);
        std::erase(loops_, loop);
    }

  private:
    Helpers() {
        const auto processors = std::max(1u, std::thread::hardware_concurrency());
        const auto threads = environment_number("ASCEND_EMULATOR_THREADS", processors);
        for (std::uint64_t i = 1; i < threads; ++i) {
            threads_.emplace_back([this] { serve(); });
        }
    }

    void serve() {
        while (true) {
            std::shared_ptr<Loop> loop;
            {
                std::unique_lock lock(mutex_);
                offered_.wait(lock, [&] { return !loops_.empty(); });
                loop = loops_.front();
                // A loop whose pieces are all taken needs no more help.
                if (loop->next.load() >= loop->pieces()) {
                    loops_.pop_front();
                    continue;
                }
            }
            loop->work();
        }
    }

    std::mutex mutex_;
    std::condition_variable offered_;
    std::deque<std::shared_ptr<Loop>> loops_;
    std::vector<std::thread> threads_;
};

} // namespace

void parallel_for(
    std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t first, std::int64_t last)>& body
) {
    if (count <= 0) {
        return;
    }
    Helpers& helpers = Helpers::instance();
    if (count <= grain || helpers.count() == 0) {
        for (std::int64_t first = 0; first < count; first += grain) {
            body(first, std::min(count, first + grain));
        }
        return;
    }
    const auto loop = std::make_shared<Loop>();
    loop->count = count;
    loop->grain = grain;
    loop->body = &body;
    helpers.help(loop);
    loop->work();
    helpers.withdraw(loop);
    loop->wait();
}

} // namespace ascend_emulator
