// Doors to what torch's C++ side asks of an allocator and its Python side cannot.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

namespace caching = c10::cuda::CUDACachingAllocator;

#define DOOR extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<int> seen[16];
unsigned long long last_pool;
void* held;
int asked;

struct GivesUp : c10::FreeMemoryCallback {
  bool Execute() override {
    ++asked;
    const bool had = held != nullptr;
    caching::raw_delete(std::exchange(held, nullptr));
    return had;
  }
};

} // namespace

namespace c10 {
C10_REGISTER_CLASS(FreeCudaMemoryCallbacksRegistry, Probe, ::GivesUp)
}

DOOR bool probe_is_torchs() {
  return c10::GetAllocator(c10::DeviceType::CUDA) == caching::get() && c10::getDeviceAllocator(c10::DeviceType::CUDA) == caching::get();
}

DOOR void probe_track() {
  caching::attachAllocatorTraceTracker([](const caching::TraceEntry& entry) {
    ++seen[entry.action_];
    last_pool = entry.mempool_.second;
  });
}

DOOR int probe_seen(int action) {
  return seen[action];
}

DOOR unsigned long long probe_last_pool() {
  return last_pool;
}

/// The bytes of a block that is held until somebody asks for memory; 0 if there is none of that size.
DOOR size_t probe_hold(size_t bytes) {
  try {
    held = caching::raw_alloc(bytes);
    return bytes;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 0;
  }
}

DOOR int probe_asked() {
  return asked;
}

DOOR size_t probe_largest() {
  try {
    size_t bytes = 0;
    caching::cacheInfo(0, &bytes);
    return bytes;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 0;
  }
}

DOOR size_t probe_block_around(char* inside, char* base) {
  try {
    size_t bytes = 0;
    return caching::getBaseAllocation(inside, &bytes) == base ? bytes : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 0;
  }
}

DOOR void probe_record_foreign_memory() {
  // Neither is the pool's: an exception would end the process.
  const c10::DataPtr foreign(&held, c10::Device(c10::kCUDA, 0));
  caching::recordStream(foreign, c10::cuda::getDefaultCUDAStream(0));
  caching::recordStream(c10::DataPtr(nullptr, c10::Device(c10::kCUDA, 0)), c10::cuda::getDefaultCUDAStream(0));
}

DOOR int probe_peer(int device, int peer) {
  try {
    caching::enablePeerAccess(device, peer);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

DOOR int probe_copy(void* to, int to_device, const void* from, int from_device, size_t bytes, bool p2p) {
  return caching::memcpyAsync(to, to_device, from, from_device, bytes, nullptr, p2p);
}

/// Threads that allocate, write, check and free at once; the number of wrong bytes.
DOOR int probe_threads(int threads, int rounds) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      try {
        for (int round = 0; round < rounds; ++round) {
          std::vector<c10::DataPtr> blocks;
          for (int block = 0; block < 8; ++block) {
            blocks.push_back(caching::get()->allocate(512 * (1 + (round * 7 + block * 13 + thread) % 3000)));
            static_cast<char*>(blocks.back().get())[0] = static_cast<char>(8 * thread + block);
          }
          for (int block = 0; block < 8; ++block) {
            wrong += static_cast<char*>(blocks[block].get())[0] != static_cast<char>(8 * thread + block);
          }
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        ++wrong;
      }
    });
  }
  for (auto& thread : running) {
    thread.join();
  }
  return wrong;
}
