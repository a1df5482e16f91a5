//! Host and GPU memory of measured copies. Only [`Gmlake::timed`] lets copies access it, and waits for them: dropping it is always safe.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;

use memmap2::{Advice, MmapMut};

use super::{Block, ClientError, CudaAllocator, Gmlake, Result, Stream};

/// Size of a huge page in bytes, to which host memory is aligned.
const HUGE_PAGE: usize = 2 << 20;

/// Host memory, initially zero, on huge pages if the system has some.
#[derive(Debug)]
pub struct HostMemory<'a> {
    library: &'a Gmlake,
    mapping: ManuallyDrop<MmapMut>,
    /// Offset of the first huge page in the mapping.
    start: usize,
    size: usize,
    pinned: bool,
}

/// Memory of a GPU.
#[derive(Debug)]
pub struct GpuMemory<'a> {
    library: &'a Gmlake,
    /// Device of memory from one of the driver's allocators; `None`: a block of the library.
    foreign: Option<i32>,
    address: usize,
    size: usize,
}

/// Range of memory, for copies.
#[derive(Clone, Copy, Debug)]
pub struct Part<'m> {
    pub(super) address: usize,
    pub(super) size: usize,
    memory: PhantomData<&'m ()>,
}

impl Part<'_> {
    fn new(address: usize, whole: usize, offset: usize, size: usize) -> Self {
        let offset = offset.min(whole);
        Part { address: address + offset, size: size.min(whole - offset), memory: PhantomData }
    }
}

impl<'a> HostMemory<'a> {
    /// Allocates host memory; pins it if requested.
    ///
    /// # Errors
    /// [`ClientError::NoMemory`]; [`ClientError::Refused`] if the memory cannot be pinned.
    pub fn new(library: &'a Gmlake, size: usize, pinned: bool) -> Result<Self> {
        let used = size.max(1).checked_next_multiple_of(HUGE_PAGE).unwrap_or(usize::MAX - HUGE_PAGE);
        let mapping = MmapMut::map_anon(used.saturating_add(HUGE_PAGE))
            .map_err(|source| ClientError::NoMemory { size, source })?;
        // Huge pages are optional.
        let _ = mapping.advise(Advice::HugePage);
        let start = mapping.as_ptr().align_offset(HUGE_PAGE);
        let mut memory =
            HostMemory { library, mapping: ManuallyDrop::new(mapping), start, size, pinned: false };
        // Faults the pages in before they are pinned or measured.
        memory.bytes().fill(0);
        if pinned {
            let address = memory.mapping[start..].as_mut_ptr();
            // SAFETY: whole pages of this mapping, which stays until they are unregistered.
            library.done(unsafe { (library.functions.glake_host_register)(address.cast(), used) })?;
            memory.pinned = true;
        }
        Ok(memory)
    }

    /// Returns the bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.mapping[self.start..self.start + self.size]
    }

    /// Returns a range, cut off at the end of the memory.
    pub fn part(&self, offset: usize, size: usize) -> Part<'_> {
        Part::new(self.mapping[self.start..].as_ptr().expose_provenance(), self.size, offset, size)
    }
}

impl Drop for HostMemory<'_> {
    fn drop(&mut self) {
        if self.pinned {
            let start = self.mapping[self.start..].as_mut_ptr();
            // SAFETY: registered by this value, and no copy is in flight.
            let status = unsafe { (self.library.functions.glake_host_unregister)(start.cast()) };
            if status != 0 {
                // Pages that stay pinned stay mapped.
                return;
            }
        }
        // SAFETY: the mapping is not used again.
        unsafe { ManuallyDrop::drop(&mut self.mapping) };
    }
}

impl<'a> GpuMemory<'a> {
    /// Allocates memory of the library's pool.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub fn of_pool(library: &'a Gmlake, size: usize, stream: Stream) -> Result<Self> {
        let block = library.alloc(size, stream)?;
        Ok(GpuMemory { library, foreign: None, address: block.0, size })
    }

    /// Allocates memory on the stream's device with one of the driver's allocators.
    ///
    /// # Errors
    /// [`ClientError::NoDriver`], [`ClientError::Driver`].
    pub fn of_driver(library: &'a Gmlake, size: usize, stream: Stream, by: CudaAllocator) -> Result<Self> {
        let driver = library.driver.as_ref().ok_or(ClientError::NoDriver)?;
        let address = driver.allocate(stream.device, size, by)?;
        Ok(GpuMemory { library, foreign: Some(stream.device), address, size })
    }

    /// Returns a range, cut off at the end of the memory.
    pub fn part(&self, offset: usize, size: usize) -> Part<'_> {
        Part::new(self.address, self.size, offset, size)
    }
}

impl Drop for GpuMemory<'_> {
    fn drop(&mut self) {
        // Memory whose release fails is released at the end of the process.
        match (self.foreign, &self.library.driver) {
            (Some(device), Some(driver)) => driver.release(device, self.address),
            _ => drop(self.library.free(Block(self.address))),
        }
    }
}
