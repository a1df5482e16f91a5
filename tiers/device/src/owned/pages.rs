//! Host memory straight from the operating system, on huge pages if available, and its registration with the driver, which pins it.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use glake_units::Bytes;
use memmap2::{Advice, MmapOptions, MmapRaw};

use super::{CompletionEvents, DeviceSet};
use crate::{Address, DriverError, Result, Verb};

/// Size of a huge page, the alignment and the unit of length of the memory.
const HUGE: usize = 2 << 20;
/// Size of a small page, for systems without huge pages.
const SMALL: usize = 4 << 10;
/// Upper bound of NUMA node numbers: the kernel supports at most this many.
const NODES: usize = 1 << 10;

/// An exclusive range of zeroed host memory that a forked child does not inherit.
///
/// ```text
/// mapped  ├ head ┼──────── size ────────┼ rest ┤     one huge page longer than `size`: head and rest are never touched
/// ```
#[derive(Debug)]
pub struct Pages {
    map: MmapRaw,
    /// Bytes before the first huge page.
    head: usize,
    size: usize,
}

impl Pages {
    /// Maps at least `size` bytes, rounded up to huge pages. `threads` threads touch the memory, so that its pages exist when it is pinned
    /// (16 threads make pinning 4 GiB four times as fast as one driver call); 0 touches nothing.
    pub fn new(size: Bytes, threads: usize) -> Result<Self> {
        let refused = |source| DriverError::Os { verb: Verb::HostRegister, source };
        let rounded = size.align_up(Bytes::new(HUGE as u64)).and_then(|s| usize::try_from(s.get()).ok());
        let too_large = || refused(std::io::Error::from_raw_os_error(libc::ENOMEM));
        let size = rounded.filter(|&size| size > 0).ok_or_else(too_large)?;
        let whole = size.checked_add(HUGE).ok_or_else(too_large)?;
        let map = MmapRaw::from(MmapOptions::new().len(whole).map_anon().map_err(refused)?);
        let head = map.as_ptr().align_offset(HUGE);
        for wish in [Advice::HugePage, Advice::DontFork] {
            // Failures are harmless: the memory is slower, or copied on a fork.
            let _ = map.advise_range(wish, head, size);
        }
        let mut pages = Pages { map, head, size };
        pages.touch_all(threads);
        Ok(pages)
    }

    /// Interleaves the memory over NUMA nodes. Only for memory not touched yet: existing pages do not move.
    ///
    /// # Errors
    /// The operating system's error if it has no such nodes or forbids the choice. The memory stays usable and each page lies on the node
    /// that touches it first.
    pub fn interleave(&mut self, nodes: &[u32]) -> std::io::Result<()> {
        const BITS: usize = libc::c_ulong::BITS as usize;
        let mut mask: Vec<libc::c_ulong> = Vec::new();
        for &node in nodes {
            let node = usize::try_from(node).unwrap_or(usize::MAX);
            if node >= NODES {
                return Err(std::io::Error::from_raw_os_error(libc::EINVAL));
            }
            mask.resize(mask.len().max(node / BITS + 1), 0);
            mask[node / BITS] |= 1 << (node % BITS);
        }
        // The kernel reads one bit less than the given number.
        let bits = mask.len() * BITS + 1;
        // SAFETY: the range is this value's own, and the mask holds that many bits. The call changes only the placement of pages
        // that do not exist yet.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.first(),
                self.size,
                libc::MPOL_INTERLEAVE,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        if answer == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// Returns the start address.
    pub fn start(&self) -> Address {
        Address(self.first() as u64)
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        Bytes::new(self.size as u64)
    }

    /// Returns the bytes as a slice. The caller must wait for device work on them.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is mapped for as long as this value lives, and initialised by the system.
        unsafe { std::slice::from_raw_parts(self.first(), self.size) }
    }

    /// Returns the bytes for writing. The caller must wait for device work on them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.first(), self.size) }
    }

    fn first(&self) -> *mut u8 {
        self.map.as_mut_ptr().wrapping_add(self.head)
    }

    /// Makes the operating system allocate the pages of a page-aligned part, as first writes would; the bytes do not change.
    /// `MADV_POPULATE_WRITE` is not used: it holds the address-space lock, so that page faults and pinning on other threads would wait.
    pub fn touch(part: &mut [u8]) {
        for page in part.chunks_mut(SMALL) {
            // SAFETY: the first byte of a slice that is not empty, to which this is the only reference.
            let first = unsafe { AtomicU8::from_ptr(page.as_mut_ptr()) };
            // An existing page is only read. The first byte of a new page is zero, so it is written without being read first.
            let _ = first.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn touch_all(&mut self, threads: usize) {
        if threads == 0 {
            return;
        }
        let share = self.size.div_ceil(threads).next_multiple_of(HUGE);
        std::thread::scope(|scope| {
            for part in self.as_mut_slice().chunks_mut(share) {
                scope.spawn(move || Self::touch(part));
            }
        });
    }
}

/// Words of a memory file, mapped for writing: processes that have the file can read them at any time.
#[derive(Debug)]
pub struct SharedWords {
    map: MmapRaw,
    words: usize,
}

impl SharedWords {
    /// Maps the first words of a memory file.
    ///
    /// # Errors
    /// `InvalidInput` if the file is not sealed against shrinking or has fewer words; the operating system's error.
    pub fn map(file: BorrowedFd<'_>, words: usize) -> io::Result<Self> {
        // SAFETY: the call takes no pointer.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 {
            return Err(io::Error::last_os_error());
        }
        let is_sealed = seals & libc::F_SEAL_SHRINK != 0;
        let size = std::fs::File::from(file.as_fd().try_clone_to_owned()?).metadata()?.len();
        let length = words.saturating_mul(size_of::<u64>());
        if words == 0 || !is_sealed || size < length as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(SharedWords { map: MmapOptions::new().len(length).map_raw(&file)?, words })
    }

    /// Returns the words. Other processes may read them at any time, and only this one writes them.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the words are mapped for as long as this value lives, because the file cannot shrink, and a mapping is aligned to pages.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.words) }
    }
}

/// Exclusively owned host memory that every device can copy from and to at full speed.
///
/// Dropping it waits for all work of all devices that have a context, then unpins and frees the memory. If that fails (a lost context), the
/// memory leaks: a device may still write to it.
#[derive(Debug)]
pub struct Registration {
    completion_events: Arc<CompletionEvents>,
    devices: DeviceSet,
    pages: ManuallyDrop<Pages>,
}

impl Registration {
    /// Pins pages of host memory.
    pub fn new(completion_events: &Arc<CompletionEvents>, pages: Pages) -> Result<Self> {
        let driver = completion_events.driver();
        let devices = driver.devices()?.into_iter().map(|device| device.id).collect();
        // SAFETY: the pages are aligned and owned, and stay mapped until they are unregistered.
        unsafe { driver.host_register(pages.start(), pages.size())? };
        Ok(Registration {
            completion_events: completion_events.clone(),
            devices,
            pages: ManuallyDrop::new(pages),
        })
    }

    /// Returns the start address.
    pub fn start(&self) -> Address {
        self.pages.start()
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.pages.size()
    }

    /// Returns the bytes as a slice. The caller must wait for device work on them.
    pub fn as_slice(&self) -> &[u8] {
        self.pages.as_slice()
    }

    /// Returns the bytes for writing. The caller must wait for device work on them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.pages.as_mut_slice()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.completion_events.synchronize(self.devices).is_err() {
            return;
        }
        // SAFETY: the range was registered, and all work of every device is done.
        if unsafe { self.completion_events.driver().host_unregister(self.pages.start()) }.is_ok() {
            // SAFETY: the pages are dropped once, here, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_and_zeroed() {
        for (asked, threads) in [(1, 0), (5 << 20, 3), (2 << 20, 16)] {
            let mut pages = Pages::new(Bytes::new(asked), threads).unwrap();
            assert!(pages.size().get() >= asked && pages.size().is_aligned(Bytes::mib(2)));
            assert_eq!(pages.start().0 % (2 << 20), 0);
            assert!(pages.as_slice().iter().all(|&byte| byte == 0));
            pages.as_mut_slice().fill(3);
        }
        assert!(Pages::new(Bytes::ZERO, 1).is_err());
        assert!(Pages::new(Bytes::MAX, 1).is_err());
        assert!(Pages::new(Bytes::new(1 << 62), 1).is_err());
    }

    /// Returns the `VmFlags` line of `/proc/self/smaps` for the mapping at an address.
    fn flags(start: Address) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps.lines().skip_while(|line| {
            let range = line.split_once('-').and_then(|(from, to)| Some((from, to.split_once(' ')?.0)));
            let number = |hex| u64::from_str_radix(hex, 16).ok();
            !range.is_some_and(|(from, to)| {
                number(from).zip(number(to)).is_some_and(|(from, to)| (from..to).contains(&start.0))
            })
        });
        own.map(str::to_owned).find(|line| line.starts_with("VmFlags:")).unwrap()
    }

    #[test]
    fn a_child_does_not_inherit_it_and_it_is_on_huge_pages() {
        let pages = Pages::new(Bytes::mib(4), 1).unwrap();
        let flags = flags(pages.start());
        assert!(flags.contains(" dc"), "{flags}");
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            assert!(flags.contains(" hg"), "{flags}");
        }
    }

    #[test]
    fn touching_changes_nothing() {
        let mut pages = Pages::new(Bytes::mib(4), 0).unwrap();
        pages.as_mut_slice()[7] = 9;
        Pages::touch(pages.as_mut_slice());
        Pages::touch(&mut pages.as_mut_slice()[1..10_000]);
        Pages::touch(&mut []);
        assert!(pages.as_slice().iter().enumerate().all(|(at, byte)| *byte == if at == 7 { 9 } else { 0 }));
    }

    #[test]
    fn touched_pages_exist() {
        let mut pages = Pages::new(Bytes::mib(4), 0).unwrap();
        let (there, rest) = pages.as_mut_slice().split_at_mut(HUGE);
        Pages::touch(there);
        let is_there = |part: &[u8]| {
            let mut pages = vec![0_u8; HUGE / SMALL];
            // SAFETY: the part is mapped, and there is a byte for each of its pages.
            let asked =
                unsafe { libc::mincore(part.as_ptr().cast_mut().cast(), part.len(), pages.as_mut_ptr()) };
            assert_eq!(asked, 0);
            pages.iter().map(|page| page & 1).collect::<Vec<_>>()
        };
        assert!(is_there(there).iter().all(|page| *page == 1));
        assert!(is_there(rest).contains(&0));
    }

    #[test]
    fn pages_lie_on_nodes_that_exist_only() {
        let mut pages = Pages::new(Bytes::mib(2), 0).unwrap();
        let maps = || std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
        if std::path::Path::new("/proc/self/numa_maps").exists() {
            pages.interleave(&[0]).unwrap();
            assert!(maps().lines().any(|line| line.contains("interleave:0")), "{}", maps());
        } else {
            eprintln!("skipped: this kernel knows no NUMA nodes");
        }
        assert!(pages.interleave(&[1023]).is_err());
        assert!(pages.interleave(&[u32::MAX]).is_err());
        pages.as_mut_slice().fill(7);
    }
}

#[cfg(test)]
mod registration_tests {
    use super::*;
    use crate::stub::Stub;
    use crate::{Recorder, Verb};

    #[test]
    fn unpinning_waits_for_all_work() {
        let recorder = Arc::new(Recorder::measured(Stub::new()).with_log());
        let completion_events = CompletionEvents::new(recorder.clone());
        let mut pinned =
            Registration::new(&completion_events, Pages::new(Bytes::mib(2), 1).unwrap()).unwrap();
        pinned.as_mut_slice()[7] = 1;
        assert_eq!(pinned.as_slice()[7], 1);
        drop(pinned);
        let verbs: Vec<Verb> = recorder.take_log().iter().map(|logged| logged.call.verb).collect();
        use Verb::*;
        assert_eq!(verbs, [Devices, HostRegister, ContextSynchronize, ContextSynchronize, HostUnregister]);
    }
}
