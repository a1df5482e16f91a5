//! Memory that copies are measured between. Nothing touches it outside of [`Gmlake::timed`], which waits for its copies: so
//! it can be given back at any time.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

use crate::{CudaAllocator, Gmlake, Libcuda, LoadError, Result, Stream};

/// The size of a huge page, of which host memory is a multiple.
const HUGE: usize = 2 << 20;

/// Host memory of zeroes, on huge pages where there are some.
#[derive(Debug)]
pub struct HostMemory<'a> {
    library: &'a Gmlake,
    start: NonNull<u8>,
    size: usize,
    mapped: usize,
    pinned: bool,
}

/// Memory of a GPU.
#[derive(Debug)]
pub struct GpuMemory<'a> {
    owner: Owner<'a>,
    address: usize,
    size: usize,
}

#[derive(Debug)]
enum Owner<'a> {
    Pool(&'a Gmlake),
    Cuda(&'a Libcuda, u32),
}

/// A range of memory, for copies.
#[derive(Clone, Copy, Debug)]
pub struct Part<'m> {
    pub(crate) address: usize,
    pub(crate) size: usize,
    memory: PhantomData<&'m ()>,
}

impl Part<'_> {
    fn of(address: usize, whole: usize, offset: usize, size: usize) -> Self {
        let offset = offset.min(whole);
        Part { address: address + offset, size: size.min(whole - offset), memory: PhantomData }
    }

    /// How long it is.
    pub fn size(&self) -> usize {
        self.size
    }
}

impl<'a> HostMemory<'a> {
    pub(crate) fn new(library: &'a Gmlake, size: usize, pinned: bool) -> Result<Self> {
        let mapped = size.max(1).checked_next_multiple_of(HUGE).unwrap_or(usize::MAX - HUGE);
        let whole = mapped.saturating_add(HUGE);
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping at an address of the system's choice.
        let raw = unsafe { libc::mmap(null_mut(), whole, protection, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return Err(LoadError::NoMemory { size, source: std::io::Error::last_os_error() });
        }
        let head = raw.cast::<u8>().align_offset(HUGE);
        // SAFETY: `head` is below HUGE, and the mapping is HUGE longer than what is used of it. Huge pages are a wish.
        let start = unsafe {
            let start = raw.cast::<u8>().add(head);
            libc::munmap(raw, head);
            libc::munmap(start.add(mapped).cast(), HUGE - head);
            libc::madvise(start.cast(), mapped, libc::MADV_HUGEPAGE);
            start
        };
        let start = NonNull::new(start).unwrap_or(NonNull::dangling());
        let mut memory = HostMemory { library, start, size, mapped, pinned: false };
        // Touched before it is pinned or measured.
        memory.bytes().fill(0);
        if pinned {
            // SAFETY: whole pages of this value's, which stay until it is dropped.
            let status = unsafe { (library.functions.glake_host_register)(start.as_ptr().cast(), mapped) };
            library.done(status)?;
            memory.pinned = true;
        }
        Ok(memory)
    }

    /// Its bytes, while no copy of it is described.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped, zeroed by the system, this value's alone; copies run only while a part is borrowed of it.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size) }
    }

    /// A range of it, cut off at its end.
    pub fn part(&self, offset: usize, size: usize) -> Part<'_> {
        Part::of(self.start.as_ptr().expose_provenance(), self.size, offset, size)
    }
}

impl Drop for HostMemory<'_> {
    fn drop(&mut self) {
        let start: *mut c_void = self.start.as_ptr().cast();
        if self.pinned {
            // SAFETY: pinned by this value, and no copy of it is under way. If it fails the pages stay.
            let status = unsafe { (self.library.functions.glake_host_unregister)(start) };
            if status != 0 {
                return;
            }
        }
        // SAFETY: mapped by this value and used by nobody any more.
        unsafe { libc::munmap(start, self.mapped) };
    }
}

impl<'a> GpuMemory<'a> {
    pub(crate) fn of_pool(library: &'a Gmlake, device: i32, size: usize, stream: Stream) -> Result<Self> {
        let block = library.alloc(device, size, stream)?;
        Ok(GpuMemory { owner: Owner::Pool(library), address: block.0, size })
    }

    pub(crate) fn of_cuda(cuda: &'a Libcuda, device: u32, size: usize, by: CudaAllocator) -> Result<Self> {
        let address = cuda.allocate(device, size, by)?;
        Ok(GpuMemory { owner: Owner::Cuda(cuda, device), address, size })
    }

    /// A range of it, cut off at its end.
    pub fn part(&self, offset: usize, size: usize) -> Part<'_> {
        Part::of(self.address, self.size, offset, size)
    }
}

impl Drop for GpuMemory<'_> {
    fn drop(&mut self) {
        match self.owner {
            // What fails here leaves memory to the end of the process.
            Owner::Pool(library) => {
                let _ = library.free(crate::Block(self.address));
            }
            Owner::Cuda(cuda, device) => cuda.release(device, self.address),
        }
    }
}
