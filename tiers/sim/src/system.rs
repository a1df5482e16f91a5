//! System calls behind simulated memory, each in one place.
//!
//! Addresses are integers throughout the simulator; they become pointers only in this file. Everything mapped is `MAP_SHARED` file memory
//! or `PROT_NONE`, so no Rust reference ever points into it.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use glake_device::Protection;

/// Granularity of memory and addresses.
pub(super) const GRANULE: u64 = 2 << 20;

fn pointer<T>(at: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(at as usize)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn mapped(result: *mut libc::c_void) -> io::Result<u64> {
    if result == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(result.expose_provenance() as u64)
    }
}

const BLANK: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Reserves `size` bytes of addresses, aligned to [`GRANULE`]; touching them faults.
pub(super) fn reserve(size: u64) -> io::Result<u64> {
    let wide = size.checked_add(GRANULE).ok_or(io::Error::from_raw_os_error(libc::ENOMEM))?;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let raw = mapped(unsafe { libc::mmap(ptr::null_mut(), wide as usize, libc::PROT_NONE, BLANK, -1, 0) })?;
    let start = raw.next_multiple_of(GRANULE);
    let (before, after) = (start - raw, raw + wide - (start + size));
    // SAFETY: both ends belong to the mapping just made, and are not shared yet.
    unsafe {
        if before > 0 {
            unreserve(raw, before)?;
        }
        if after > 0 {
            unreserve(start + size, after)?;
        }
    }
    Ok(start)
}

/// Releases reserved or mapped addresses.
///
/// # Safety
/// The range was given by [`reserve`], [`map_whole`] or [`map_shared`], and nothing uses it any more.
pub(super) unsafe fn unreserve(start: u64, size: u64) -> io::Result<()> {
    // SAFETY: the caller's promise.
    check(unsafe { libc::munmap(pointer(start), size as usize) })
}

/// Source that memory is mapped from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    /// A file, from this offset on.
    File(BorrowedFd<'a>, u64),
    /// A file that was mapped whole at this address, and closed.
    Mapped(u64),
}

/// Maps memory at reserved addresses, without access.
///
/// # Safety
/// The range lies in a reservation, and nothing uses it.
pub(super) unsafe fn map(start: u64, size: u64, source: Source<'_>) -> io::Result<()> {
    let (at, size) = (pointer(start), size as usize);
    match source {
        Source::File(file, offset) => {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let (fd, offset) = (file.as_raw_fd(), offset as libc::off_t);
            // SAFETY: the caller's promise: MAP_FIXED replaces our own blank reservation.
            mapped(unsafe { libc::mmap(at, size, libc::PROT_NONE, flags, fd, offset) })?;
        }
        Source::Mapped(from) => {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: as above. With a length of zero, `mremap` duplicates a shared mapping.
            mapped(unsafe { libc::mremap(pointer(from), 0, size, flags, at) })?;
            // SAFETY: the mapping just made, which nothing uses yet.
            check(unsafe { libc::mprotect(at, size, libc::PROT_NONE) })?;
        }
    }
    Ok(())
}

/// Makes addresses blank again.
///
/// # Safety
/// The range lies in a reservation, and nothing uses it.
pub(super) unsafe fn blank(start: u64, size: u64) -> io::Result<()> {
    let flags = BLANK | libc::MAP_FIXED;
    // SAFETY: the caller's promise: MAP_FIXED replaces memory that we mapped there.
    mapped(unsafe { libc::mmap(pointer(start), size as usize, libc::PROT_NONE, flags, -1, 0) }).map(drop)
}

/// Sets the host's access to mapped addresses.
///
/// # Safety
/// The range lies in a reservation, and nothing needs the access that this removes.
pub(super) unsafe fn protect(start: u64, size: u64, protection: Protection) -> io::Result<()> {
    let bits = match protection {
        Protection::None => libc::PROT_NONE,
        Protection::Read => libc::PROT_READ,
        Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
    };
    // SAFETY: the caller's promise.
    check(unsafe { libc::mprotect(pointer(start), size as usize, bits) })
}

/// Creates a sparse, zeroed memory file. A sealed one never changes its size, so that it is safe to map in other processes; its name tells
/// an importer where the memory lies.
pub(super) fn memory_file(name: &str, size: u64, sealed: bool) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: the name is a C string that outlives the call.
    let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let file = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: only changes the size of our own file.
    check(unsafe { libc::ftruncate(file.as_raw_fd(), size as libc::off_t) })?;
    if sealed {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: only seals our own file.
        check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    }
    Ok(file)
}

/// Returns the size of a file if it is sealed memory.
pub(super) fn sealed_size(file: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    // SAFETY: asks only.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    let wanted = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    if seals < 0 || seals & wanted != wanted {
        return Ok(None);
    }
    // SAFETY: the descriptor is open; -1 is handled.
    let size = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
    if size < 0 { Err(io::Error::last_os_error()) } else { Ok(Some(size as u64)) }
}

/// Maps a file from its start, readable and writable, at an address chosen by the kernel.
pub(super) fn map_whole(file: BorrowedFd<'_>, size: u64) -> io::Result<u64> {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let fd = file.as_raw_fd();
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start = mapped(unsafe { libc::mmap(ptr::null_mut(), size as usize, protection, flags, fd, 0) })?;
    // Best effort: a forked child uses nothing of its parent.
    // SAFETY: the mapping just made, of which no one else knows yet.
    let _ = unsafe { libc::madvise(pointer(start), size as usize, libc::MADV_DONTFORK) };
    Ok(start)
}

/// Maps a file from its start for sharing with other processes; a forked child inherits the mapping.
pub(super) fn map_shared(file: BorrowedFd<'_>, size: u64) -> io::Result<u64> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let fd = file.as_raw_fd();
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    mapped(unsafe { libc::mmap(ptr::null_mut(), size as usize, protection, libc::MAP_SHARED, fd, 0) })
}

/// Frees the memory behind a range of a file; it reads as zeroes afterwards.
pub(super) fn punch(file: BorrowedFd<'_>, offset: u64, size: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: changes bytes of our own file only.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, size as libc::off_t) })
}

/// Returns start and end of the first range with pages at or after `offset`.
pub(super) fn next_data(file: BorrowedFd<'_>, offset: u64) -> io::Result<Option<(u64, u64)>> {
    let seek = |offset: u64, whence| {
        // SAFETY: moves the position of our own file, which no code depends on.
        let found = unsafe { libc::lseek(file.as_raw_fd(), offset as libc::off_t, whence) };
        if found < 0 { Err(io::Error::last_os_error()) } else { Ok(found as u64) }
    };
    match seek(offset, libc::SEEK_DATA) {
        Ok(start) => Ok(Some((start, seek(start, libc::SEEK_HOLE)?))),
        Err(none) if none.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the bytes of the pages that a file has.
pub(super) fn pages(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: an out-parameter of this frame.
    check(unsafe { libc::fstat(file.as_raw_fd(), found.as_mut_ptr()) })?;
    // SAFETY: written, since the call succeeded.
    Ok(unsafe { found.assume_init() }.st_blocks as u64 * 512)
}

/// Moves bytes; the ranges may overlap.
///
/// # Safety
/// Both ranges are readable, the target writable; no Rust reference to either is alive.
pub(super) unsafe fn move_bytes(to: u64, from: u64, size: u64) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(pointer::<u8>(from).cast_const(), pointer::<u8>(to), size as usize) }
}

/// Fills a range with one byte.
///
/// # Safety
/// The range is writable; no Rust reference to it is alive.
pub(super) unsafe fn fill_bytes(at: u64, byte: u8, size: u64) {
    // SAFETY: the caller's promise.
    unsafe { ptr::write_bytes(pointer::<u8>(at), byte, size as usize) }
}

/// Copies bytes into a slice.
///
/// # Safety
/// The range is readable and does not overlap the slice.
pub(super) unsafe fn read_bytes(from: u64, into: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(pointer::<u8>(from).cast_const(), into.as_mut_ptr(), into.len()) }
}

/// Copies bytes out of a slice.
///
/// # Safety
/// The range is writable and does not overlap the slice.
pub(super) unsafe fn write_bytes(to: u64, bytes: &[u8]) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer::<u8>(to), bytes.len()) }
}

/// Reads a word used for signals between streams and the host.
///
/// # Safety
/// The address is readable and a multiple of four.
pub(super) unsafe fn load_word(at: u64) -> u32 {
    // SAFETY: the caller's promise; atomic, because the host may write it concurrently.
    unsafe { AtomicU32::from_ptr(pointer(at)) }.load(Ordering::Acquire)
}

/// Writes a word used for signals between streams and the host.
///
/// # Safety
/// The address is writable and a multiple of four.
pub(super) unsafe fn store_word(at: u64, value: u32) {
    // SAFETY: the caller's promise; atomic, because the host may read it concurrently.
    unsafe { AtomicU32::from_ptr(pointer(at)) }.store(value, Ordering::Release);
}

/// Returns a word shared by several processes.
///
/// # Safety
/// The address is readable and writable for as long as the reference lives, and a multiple of eight.
pub(super) unsafe fn shared_word<'a>(at: u64) -> &'a AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(pointer(at)) }
}
