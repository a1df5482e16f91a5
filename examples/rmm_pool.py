"""RAPIDS libraries (cuDF, cuML, cuGraph) in GLake's pool: RMM asks it for memory.

    python rmm_pool.py
"""

import sys

try:
    import rmm
except ImportError as error:
    sys.exit(f"rmm_pool.py needs RMM and an NVIDIA GPU: pip install rmm-cu13 ({error})")

import glake

rmm.mr.set_current_device_resource(
    rmm.mr.CallbackMemoryResource(
        lambda size, stream: glake.allocate(size, stream=stream),
        lambda address, size, stream: glake.free(address),
    )
)

sent = bytes(range(256)) * 4096
with glake.region("buffers"):
    buffer = rmm.DeviceBuffer.to_device(sent)
report = glake.shrink("buffers")  # the buffer's memory leaves the GPU, its address stays
glake.refill("buffers")
print(f"{report['freed'] >> 20} MiB left the GPU and came back; the bytes are {'the same' if buffer.tobytes() == sent else 'OTHERS'}")
print(glake.memory_summary())
