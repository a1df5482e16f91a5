// The entry of the compiled backend: puts the pools of libgmlake in the place of torch's CUDA allocator.
//
// compiled.py builds this against the headers of the torch that is installed, when glake.enable() is first called.
#include "native/allocator.h"

/// Makes the pool torch's CUDA allocator. Null on success, else the reason, valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* glake_torch_install() {
  static std::string reason;
  try {
    auto* present = glake::caching::allocator.load();
    if (present != nullptr && present->initialized()) {
      reason = "torch's CUDA allocator (" + present->name() +
          ") is in use already. Call glake.enable() before anything starts CUDA in this process.";
      return reason.c_str();
    }
    auto& ours = glake::Allocator::instance();
    ours.take_the_place_of(present);
    glake::caching::allocator.store(&ours);
    c10::SetAllocator(c10::DeviceType::CUDA, &ours);
    return nullptr;
  } catch (const std::exception& error) {
    reason = error.what();
    return reason.c_str();
  }
}

/// What pools with an allocator of their own hold on a device: their number, bytes handed out and bytes in segments. False: no such device.
extern "C" __attribute__((visibility("default"))) bool glake_torch_foreign(int device, uint64_t* pools, uint64_t* allocated, uint64_t* reserved) {
  try {
    glake::Allocator::instance().foreign(static_cast<glake::DeviceIndex>(device), *pools, *allocated, *reserved);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}
