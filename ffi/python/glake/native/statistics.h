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
