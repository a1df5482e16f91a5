// The pool's counters in torch's structure.
#pragma once

#include "status.h"
#include "torch.h"

namespace glake {

using c10::CachingDeviceAllocator::DeviceStats;

class Statistics {
 public:
  explicit Statistics(DeviceIndex device) {
    check(glake_stats(device, &from_));
  }

  /// What another allocator has reserved.
  static size_t reserved_by(caching::CUDAAllocator* other, DeviceIndex device) {
    return static_cast<size_t>(other->getDeviceStats(device).reserved_bytes[kAll].current);
  }

  static size_t allocated_by(caching::CUDAAllocator* other, DeviceIndex device) {
    return static_cast<size_t>(other->getDeviceStats(device).allocated_bytes[kAll].current);
  }

  /// Adds what another allocator holds. The peaks of two need not have met: their sum is the most that it can have been.
  static void add(DeviceStats& to, const DeviceStats& from) {
    for (const auto what :
         {&DeviceStats::allocation, &DeviceStats::segment, &DeviceStats::active, &DeviceStats::inactive_split,
          &DeviceStats::allocated_bytes, &DeviceStats::reserved_bytes, &DeviceStats::active_bytes, &DeviceStats::inactive_split_bytes,
          &DeviceStats::requested_bytes}) {
      for (size_t type = 0; type < (to.*what).size(); ++type) {
        auto& sum = (to.*what)[type];
        const auto& more = (from.*what)[type];
        sum.current += more.current;
        sum.peak += more.peak;
        sum.allocated += more.allocated;
        sum.freed += more.freed;
      }
    }
    to.num_alloc_retries += from.num_alloc_retries;
    to.num_ooms += from.num_ooms;
    to.num_sync_all_streams += from.num_sync_all_streams;
    to.num_device_alloc += from.num_device_alloc;
    to.num_device_free += from.num_device_free;
  }

  size_t allocated() const {
    return static_cast<size_t>(from_.all.allocated_bytes.current);
  }

  size_t reserved() const {
    return static_cast<size_t>(from_.all.reserved_bytes.current);
  }

  DeviceStats torch() const {
    DeviceStats to;
    fill(to.allocation, &glake_pool_stats::allocation);
    fill(to.segment, &glake_pool_stats::segment);
    fill(to.active, &glake_pool_stats::active);
    fill(to.inactive_split, &glake_pool_stats::inactive_split);
    fill(to.allocated_bytes, &glake_pool_stats::allocated_bytes);
    fill(to.reserved_bytes, &glake_pool_stats::reserved_bytes);
    fill(to.active_bytes, &glake_pool_stats::active_bytes);
    fill(to.inactive_split_bytes, &glake_pool_stats::inactive_split_bytes);
    fill(to.requested_bytes, &glake_pool_stats::requested_bytes);
    to.num_alloc_retries = from_.num_alloc_retries;
    to.num_ooms = from_.num_ooms;
    to.num_sync_all_streams = from_.num_sync_all_streams;
    to.num_device_alloc = from_.num_device_alloc;
    to.num_device_free = from_.num_device_free;
    // torch's word for "every block may be split".
    to.max_split_size = -1;
    return to;
  }

 private:
  using StatArray = c10::CachingAllocator::StatArray;
  using StatType = c10::CachingAllocator::StatType;
  static constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);

  void fill(StatArray& to, glake_stat glake_pool_stats::* what) const {
    copy(to, StatType::AGGREGATE, from_.all.*what);
    copy(to, StatType::SMALL_POOL, from_.small_pool.*what);
    copy(to, StatType::LARGE_POOL, from_.large_pool.*what);
  }

  static void copy(StatArray& array, StatType type, const glake_stat& from) {
    auto& to = array[static_cast<size_t>(type)];
    to.current = from.current;
    to.peak = from.peak;
    to.allocated = from.allocated;
    to.freed = from.freed;
  }

  glake_device_stats from_{};
};

} // namespace glake
