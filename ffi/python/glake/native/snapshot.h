// torch's snapshot: segments, history, settings.
#pragma once

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "history.h"
#include "segments.h"
#include "torch.h"

namespace glake {

class Snapshot {
 public:
  /// Everything of `devices` devices; the segments of `pool` only, unless it is no pool. `native` has pools too, unless it is null.
  static caching::SnapshotInfo take(
      History& history,
      DeviceIndex devices,
      MempoolId_t pool,
      bool include_traces,
      caching::CUDAAllocator* native) {
    caching::SnapshotInfo info;
    for (DeviceIndex device = 0; device < devices; ++device) {
      const size_t active = Segments::write(info, device, pool, history);
      history.add(TraceEntry::SNAPSHOT, device, 0, active, nullptr, pool, nullptr);
    }
    if (include_traces) {
      history.write(info, devices);
    }
    if (native != nullptr) {
      add(info, native, pool, include_traces);
    }
    auto& settings = info.config_metadata;
    settings = {};
    settings.max_split_size = std::numeric_limits<size_t>::max();
    settings.pinned_num_register_threads = caching::CUDAAllocatorConfig::pinned_num_register_threads();
    settings.pinned_use_host_register = caching::CUDAAllocatorConfig::pinned_use_cuda_host_register();
    settings.last_allocator_settings = asked();
    return info;
  }

 private:
  /// Segments and history of the pools that bring an allocator of their own.
  static void add(caching::SnapshotInfo& info, caching::CUDAAllocator* native, MempoolId_t pool, bool include_traces) {
#if GLAKE_TORCH >= 211
    auto more = native->snapshot(pool, include_traces);
#else
    auto more = native->snapshot(pool);
    if (!include_traces) {
      more.device_traces.clear();
    }
#endif
    std::move(more.segments.begin(), more.segments.end(), std::back_inserter(info.segments));
    for (size_t device = 0; device < std::min(info.device_traces.size(), more.device_traces.size()); ++device) {
      auto& trace = info.device_traces[device];
      const auto ours = static_cast<ptrdiff_t>(trace.size());
      // That a snapshot was taken is told once.
      std::copy_if(more.device_traces[device].begin(), more.device_traces[device].end(), std::back_inserter(trace), [](const auto& entry) {
        return entry.action_ != TraceEntry::SNAPSHOT;
      });
      std::inplace_merge(trace.begin(), trace.begin() + ours, trace.end(), [](const auto& one, const auto& other) {
        return one.time_.t_ < other.time_.t_;
      });
    }
  }

  /// What PYTORCH_ALLOC_CONF says. Of it only the settings of pinned memory are in force.
  static std::string asked() {
#if GLAKE_TORCH >= 210
    return c10::CachingAllocator::getAllocatorSettings();
#else
    return caching::CUDAAllocatorConfig::last_allocator_settings();
#endif
  }
};

} // namespace glake
