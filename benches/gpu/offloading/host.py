"""Host memory is touched before it is measured: a machine that has just started gets its own page by page, and slowly."""

import concurrent.futures, contextlib, ctypes, mmap, pathlib, time

GIB = 1 << 30
# So much is touched before it is asked again how much there is; so much is left alone; so much a thread touches at a time.
PIECE, SPARE, PART = 2 * GIB, 4 * GIB, 32 << 20


def available():
    """Bytes that may still be taken. On some machines there are more once others were touched."""
    with open("/proc/meminfo") as file:
        sizes = dict(line.split(":") for line in file)
    free = int(sizes["MemAvailable"].split()[0]) << 10
    group = pathlib.Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return free


def touch(most, seconds, threads=16):
    """Writes to so many bytes, for so long at most, and gives them back; how many that were."""
    held, until = [], time.monotonic() + seconds
    with concurrent.futures.ThreadPoolExecutor(threads) as workers:
        while len(held) * PIECE < most and time.monotonic() < until:
            if available() < PIECE + SPARE:
                # It may be growing.
                time.sleep(0.5)
                if available() < PIECE + SPARE:
                    break
            memory = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            # Without Python's lock.
            list(workers.map(lambda at: ctypes.memset(start + at, 1, PART), range(0, PIECE, PART)))
            held.append(memory)
    for memory in held:
        memory.close()
    return len(held) * PIECE
