//! Copies, through the C interface and beside it, timed.

use std::ffi::{CStr, c_void};
use std::time::{Duration, Instant};

use glake_abi::{CopyBlock, GLAKE_COPY_DIRECT};

use crate::{CudaAllocator, Gmlake, GpuMemory, HostMemory, Libcuda, LoadError, Part, Result, Stream};

/// A stream of a device.
#[derive(Clone, Copy, Debug)]
pub struct On {
    /// Which device.
    pub device: u32,
    /// Its stream.
    pub stream: Stream,
}

/// What is enqueued on a stream.
#[derive(Clone, Debug)]
pub enum Enqueued<'m> {
    /// `glake_copy_async`.
    Copy(Part<'m>, Part<'m>),
    /// `glake_copy_list`.
    List(Vec<(Part<'m>, Part<'m>)>),
    /// `glake_copy_to_all`.
    ToAll(Vec<Part<'m>>, Part<'m>),
    /// The driver's own, one after the other: `cuMemcpyAsync`, or what the library makes of it where there is no driver.
    Native(Vec<(Part<'m>, Part<'m>)>),
}

/// How long it took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timed {
    /// Until the last call had returned.
    pub issued: Duration,
    /// Until all streams were done.
    pub done: Duration,
}

impl Gmlake {
    /// Lets copies use other GPUs' links, or no longer.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn multi_path(&self, on: bool) -> Result<()> {
        // SAFETY: it takes a number.
        self.done(unsafe { (self.functions.glake_multi_path)(i32::from(on)) })
    }

    /// What copies did: a JSON object.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn copy_stats(&self) -> Result<String> {
        // SAFETY: it takes nothing.
        let text = unsafe { (self.functions.glake_copy_stats_json)() };
        if text.is_null() {
            return Err(self.refusal(0));
        }
        // SAFETY: a text of ours that ends with a zero, given back once, after it was copied.
        unsafe {
            let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
            (self.functions.glake_string_free)(text);
            Ok(copy)
        }
    }

    /// Host memory of zeroes.
    ///
    /// # Errors
    /// [`LoadError::NoMemory`]; [`LoadError::Refused`] where it cannot be pinned.
    pub fn host_memory(&self, size: usize, pinned: bool) -> Result<HostMemory<'_>> {
        HostMemory::new(self, size, pinned)
    }

    /// Memory of the pool.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn pool_memory(&self, device: i32, size: usize, stream: Stream) -> Result<GpuMemory<'_>> {
        GpuMemory::of_pool(self, device, size, stream)
    }

    /// Memory that the driver makes.
    ///
    /// # Errors
    /// [`LoadError::Driver`].
    pub fn foreign_memory<'a>(
        &self,
        cuda: &'a Libcuda,
        device: u32,
        size: usize,
        by: CudaAllocator,
    ) -> Result<GpuMemory<'a>> {
        GpuMemory::of_cuda(cuda, device, size, by)
    }

    /// Enqueues work on streams, in turn, and waits for all of them. `flags` are those of the copies through the library.
    ///
    /// # Errors
    /// The first that something answered; everything was waited for then too.
    pub fn timed(&self, cuda: Option<&Libcuda>, work: &[(On, Enqueued<'_>)], flags: u32) -> Result<Timed> {
        self.run(cuda, work, flags, None)
    }

    fn run(
        &self,
        cuda: Option<&Libcuda>,
        work: &[(On, Enqueued<'_>)],
        flags: u32,
        nap: Option<Duration>,
    ) -> Result<Timed> {
        let lists: Vec<Vec<CopyBlock>> = work.iter().map(|(_, enqueued)| blocks(enqueued)).collect();
        let all: Vec<Vec<*mut c_void>> = work.iter().map(|(_, enqueued)| pointers(enqueued)).collect();
        let begin = Instant::now();
        let enqueued =
            work.iter().zip(lists.iter().zip(&all)).try_for_each(|((on, enqueued), (list, all))| {
                if let Some(cuda) = cuda {
                    cuda.enter(on.device)?;
                }
                // SAFETY: the parts live until this returns, and everything is waited for below.
                unsafe { self.enqueue(cuda, *on, enqueued, list, all, flags) }
            });
        let issued = begin.elapsed();
        if let (Some(nap), Ok(())) = (nap, &enqueued) {
            std::thread::sleep(nap.saturating_sub(issued));
        }
        let waited: Vec<Result<()>> = work.iter().map(|(on, _)| self.wait(cuda, *on)).collect();
        let done = begin.elapsed();
        enqueued?;
        waited.into_iter().collect::<Result<()>>()?;
        Ok(Timed { issued, done })
    }

    /// As [`Gmlake::timed`], so many times over: enqueued, slept over, and waited for. Returns how long all of it took.
    ///
    /// # Errors
    /// As [`Gmlake::timed`].
    pub fn repeated(
        &self,
        cuda: Option<&Libcuda>,
        work: &[(On, Enqueued<'_>)],
        flags: u32,
        times: u32,
        nap: Duration,
    ) -> Result<Duration> {
        let times = usize::try_from(times).unwrap_or(usize::MAX);
        let all: Vec<(On, Enqueued<'_>)> = work.iter().cycle().take(work.len() * times).cloned().collect();
        self.run(cuda, &all, flags, Some(nap)).map(|timed| timed.done)
    }

    /// # Safety
    /// The parts live until the stream was waited for; `list` and `all` are those of `enqueued`.
    unsafe fn enqueue(
        &self,
        cuda: Option<&Libcuda>,
        on: On,
        enqueued: &Enqueued<'_>,
        list: &[CopyBlock],
        all: &[*mut c_void],
        flags: u32,
    ) -> Result<()> {
        let functions = &self.functions;
        let stream = on.stream.0 as *mut c_void;
        let null = std::ptr::null_mut();
        let one = |to: &Part<'_>, from: &Part<'_>, flags| {
            let size = to.size.min(from.size);
            let (to, from) = (to.address as *mut c_void, from.address as *const c_void);
            // SAFETY: the caller's promise; null asks for no handle.
            self.done(unsafe { (functions.glake_copy_async)(to, from, size, stream, flags, null) })
        };
        match (enqueued, cuda) {
            (Enqueued::Copy(to, from), _) => one(to, from, flags),
            (Enqueued::List(_), _) => {
                // SAFETY: as above.
                self.done(unsafe {
                    (functions.glake_copy_list)(list.as_ptr(), list.len(), stream, flags, null)
                })
            }
            (Enqueued::ToAll(to, from), _) => {
                let size = to.iter().map(Part::size).fold(from.size, usize::min);
                let from = from.address as *const c_void;
                // SAFETY: as above.
                self.done(unsafe {
                    (functions.glake_copy_to_all)(all.as_ptr(), all.len(), from, size, stream, flags, null)
                })
            }
            (Enqueued::Native(pairs), Some(cuda)) => pairs.iter().try_for_each(|(to, from)| {
                // SAFETY: as above.
                unsafe { cuda.copy(*to, *from, on.stream) }
            }),
            (Enqueued::Native(pairs), None) => {
                pairs.iter().try_for_each(|(to, from)| one(to, from, GLAKE_COPY_DIRECT))
            }
        }
    }

    fn wait(&self, cuda: Option<&Libcuda>, on: On) -> Result<()> {
        match cuda {
            Some(cuda) => cuda.synchronize(on.stream),
            None => {
                let device = i32::try_from(on.device).unwrap_or(-1);
                // SAFETY: a stream of the library's.
                self.done(unsafe {
                    (self.functions.glake_stream_synchronize)(device, on.stream.0 as *mut c_void)
                })
            }
        }
    }
}

fn blocks(enqueued: &Enqueued<'_>) -> Vec<CopyBlock> {
    match enqueued {
        Enqueued::List(pairs) => {
            let block = |(to, from): &(Part<'_>, Part<'_>)| CopyBlock {
                to: to.address as *mut c_void,
                from: from.address as *const c_void,
                size: to.size.min(from.size),
            };
            pairs.iter().map(block).collect()
        }
        _ => Vec::new(),
    }
}

fn pointers(enqueued: &Enqueued<'_>) -> Vec<*mut c_void> {
    match enqueued {
        Enqueued::ToAll(to, _) => to.iter().map(|to| to.address as *mut c_void).collect(),
        _ => Vec::new(),
    }
}

impl LoadError {
    /// Whether the library has no memory left, so that a smaller measurement may do.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, LoadError::Refused { status: 1, .. } | LoadError::Driver { code: 2, .. })
    }
}
