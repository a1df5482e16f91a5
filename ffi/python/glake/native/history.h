// The history of the allocator: a ring of trace entries a device, what is remembered of each live block, and trackers.
//
// Nothing here calls into libgmlake, so that its observers may call this. Contexts (stacks, with the interpreter's lock) are gathered
// by the caller before any lock is taken.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch.h"

namespace glake {

/// What is remembered of a block while it lives.
struct Live {
  Context context;
  void* stream = nullptr;
  MempoolId_t pool = kNoPool;
  size_t requested = 0;
};

/// What a thread is allocating for: mappings made meanwhile are put down to it.
struct Cause {
  Context context;
  void* stream = nullptr;
  MempoolId_t pool = kNoPool;
};

class History {
 public:
  using Tracker = caching::AllocatorTraceTracker;

  /// True while somebody looks: the allocator's short way asks nothing else.
  bool watched() const {
    return watchers_.load(std::memory_order_relaxed) != 0;
  }

  bool enabled() const {
    return (watchers_.load(std::memory_order_relaxed) & kRecording) != 0;
  }

  /// True while entries are recorded or tracked; else only the ends of remembered blocks are of interest.
  bool looking() const {
    return (watchers_.load(std::memory_order_relaxed) & (kRecording | kTracking)) != 0;
  }

  /// Starts or stops the recording. `skipped` is a mask of actions (1 << action) that are not kept.
  void record(bool enabled, caching::CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear, uint32_t skipped) {
    TORCH_CHECK(when == RecordContext::NEVER || recorder != nullptr, "recordHistory: contexts are asked for, but no recorder is given");
    std::deque<TraceEntry> dropped;
    std::vector<std::deque<TraceEntry>> rings;
    const std::lock_guard<std::mutex> lock(mutex_);
    max_entries_ = std::max<size_t>(max_entries, 1);
    skipped_ = skipped;
    recorder_.store(enabled ? recorder : nullptr);
    level_.store(enabled ? when : RecordContext::NEVER);
    if (!enabled || clear) {
      rings.swap(rings_);
      annotations_.clear();
    }
    watch(kRecording, enabled);
    if (!looking()) {
      // What has no context is of use to entries only.
      for (auto live = live_.begin(); live != live_.end();) {
        live = live->second.context == nullptr ? live_.erase(live) : std::next(live);
      }
      watch(kContexts, !live_.empty());
    }
  }

  void attach(Tracker tracker) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto grown = trackers_ ? std::make_shared<std::vector<Tracker>>(*trackers_) : std::make_shared<std::vector<Tracker>>();
    grown->push_back(std::move(tracker));
    trackers_ = std::move(grown);
    watch(kTracking, true);
  }

  /// The caller's stack, if contexts of this level are wanted. Takes the interpreter's lock: call it with no lock held.
  Context gather(RecordContext level) const {
    const auto recorder = recorder_.load();
    return recorder != nullptr && level_.load() >= level ? recorder() : nullptr;
  }

  /// A block began.
  void began(DeviceIndex device, void* block, Live live) {
    if (!looking()) {
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      live_[block] = live;
      watch(kContexts, true);
    }
    add(TraceEntry::ALLOC, device, reinterpret_cast<size_t>(block), live.requested, live.stream, live.pool, std::move(live.context));
  }

  /// A block is about to end: said before it does, so that whoever gets its address next is recorded later.
  void ends(DeviceIndex device, void* block, Context context) {
    Live live = forget(block);
    if (context == nullptr) {
      context = live.context;
    }
    const auto address = reinterpret_cast<size_t>(block);
    add(TraceEntry::FREE_REQUESTED, device, address, live.requested, live.stream, live.pool, context);
    add(TraceEntry::FREE_COMPLETED, device, address, live.requested, live.stream, live.pool, std::move(context));
  }

  /// What was allocated before anybody looked: known from now on, without a context.
  void found(void* block, Live live) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_.try_emplace(block, std::move(live));
    watch(kContexts, true);
  }

  Context context_of(void* block) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = live_.find(block);
    return known == live_.end() ? nullptr : known->second.context;
  }

  /// Keeps an entry and shows it to the trackers, which are called with no lock of this class held.
  void add(TraceEntry::Action action, DeviceIndex device, size_t address, size_t size, void* stream, MempoolId_t pool, Context context) {
    if (!looking()) {
      return;
    }
    TraceEntry entry(
        action,
        device,
        address,
        size,
        static_cast<cudaStream_t>(stream),
        pool,
        c10::getApproximateTime(),
        level_.load() >= RecordContext::ALLOC ? std::move(context) : nullptr,
        compile_contexts().empty() ? std::string("N/A") : compile_contexts().back()
#if GLAKE_TORCH >= 210
            ,
        user_metadata()
#endif
    );
    std::shared_ptr<const std::vector<Tracker>> trackers;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      trackers = trackers_;
      if (enabled() && device >= 0 && (skipped_ >> action & 1) == 0) {
        if (rings_.size() <= static_cast<size_t>(device)) {
          rings_.resize(device + 1);
        }
        push(rings_[device], entry);
      }
    }
    if (trackers) {
      for (const auto& tracker : *trackers) {
        tracker(entry);
      }
    }
  }

  void annotate(DeviceIndex device, const std::vector<std::pair<std::string, std::string>>& metadata) {
    Annotation entry(device, c10::getApproximateTime());
    for (const auto& [name, value] : metadata) {
      entry.recordUserMetadata(name, value);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (enabled()) {
      push(annotations_, entry);
    }
  }

  /// The entries of `devices` devices and the annotations, oldest first, their times in microseconds since the epoch.
  void write(caching::SnapshotInfo& info, size_t devices) {
    const auto nanoseconds = clock_.makeConverter();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t device = 0; device < devices; ++device) {
      auto& trace = info.device_traces.emplace_back();
      if (device < rings_.size()) {
        trace.assign(rings_[device].begin(), rings_[device].end());
      }
      for (auto& entry : trace) {
        entry.time_.t_ = nanoseconds(entry.time_.approx_t_) / 1000;
      }
    }
    info.external_annotations.assign(annotations_.begin(), annotations_.end());
    for (auto& entry : info.external_annotations) {
      entry.time_.t_ = nanoseconds(entry.time_.approx_t_) / 1000;
    }
  }

  /// The compilations that this thread is in, innermost last.
  static std::vector<std::string>& compile_contexts() {
    static thread_local std::vector<std::string> contexts;
    return contexts;
  }

  /// What the program set for this thread's entries.
  static std::string& user_metadata() {
    static thread_local std::string metadata;
    return metadata;
  }

  static Cause& cause() {
    static thread_local Cause cause;
    return cause;
  }

 private:
  static constexpr uint32_t kRecording = 1;
  static constexpr uint32_t kTracking = 2;
  // Blocks are remembered although nobody records any more: their ends must still be seen.
  static constexpr uint32_t kContexts = 4;

  void watch(uint32_t bit, bool on) {
    if (on) {
      watchers_.fetch_or(bit);
    } else {
      watchers_.fetch_and(~bit);
    }
  }

  Live forget(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = live_.find(block);
    if (known == live_.end()) {
      return Live{};
    }
    Live live = std::move(known->second);
    live_.erase(known);
    if (live_.empty()) {
      watch(kContexts, false);
    }
    return live;
  }

  template <typename Entry>
  void push(std::deque<Entry>& ring, const Entry& entry) {
    while (ring.size() >= max_entries_) {
      ring.pop_front();
    }
    ring.push_back(entry);
  }

  mutable std::mutex mutex_;
  std::atomic<uint32_t> watchers_{0};
  std::atomic<caching::CreateContextFn> recorder_{nullptr};
  std::atomic<RecordContext> level_{RecordContext::NEVER};
  size_t max_entries_ = 1;
  uint32_t skipped_ = 0;
  std::vector<std::deque<TraceEntry>> rings_;
  std::deque<Annotation> annotations_;
  std::unordered_map<void*, Live> live_;
  std::shared_ptr<const std::vector<Tracker>> trackers_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

/// Puts what the library maps during a call down to the call.
class CauseGuard {
 public:
  explicit CauseGuard(Cause cause) : before_(std::exchange(History::cause(), std::move(cause))) {}
  CauseGuard(const CauseGuard&) = delete;
  CauseGuard& operator=(const CauseGuard&) = delete;
  ~CauseGuard() {
    History::cause() = std::move(before_);
  }

 private:
  Cause before_;
};

} // namespace glake
