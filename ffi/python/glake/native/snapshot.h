// torch's snapshot: segments, history, settings.
#pragma once

#include <limits>
#include <string>

#include "history.h"
#include "segments.h"
#include "torch.h"

namespace glake {

class Snapshot {
 public:
  /// Everything of `devices` devices; the segments of `pool` only, unless it is no pool.
  static caching::SnapshotInfo take(History& history, DeviceIndex devices, MempoolId_t pool, bool include_traces) {
    caching::SnapshotInfo info;
    for (DeviceIndex device = 0; device < devices; ++device) {
      const size_t active = Segments::write(info, device, pool, history);
      history.add(TraceEntry::SNAPSHOT, device, 0, active, nullptr, pool, nullptr);
    }
    if (include_traces) {
      history.write(info, devices);
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
