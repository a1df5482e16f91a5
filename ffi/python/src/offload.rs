//! Offloaded bytes of live blocks and offload sites, each owned by a Python object.

use glake_abi::Pack;
use pyo3::prelude::*;

use crate::bindings::Pass;
use crate::error::{InvalidError, OutOfMemoryError, UnsupportedError, checked, written};
use crate::library::symbols;

/// Offloaded bytes, released when the object is dropped.
#[pyclass(frozen, weakref)]
#[derive(Debug)]
pub(crate) struct Packed {
    id: u64,
    bytes: u64,
}

#[pymethods]
impl Packed {
    /// Number of offloaded bytes.
    #[getter]
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn begin(&self, py: Python<'_>, stream: usize, address: usize) -> PyResult<()> {
        checked(py, |symbols| {
            // SAFETY: the library looks the address up; a stream is a name to it.
            unsafe { (symbols.glake_offload_reload)(self.id, address.pass(), stream.pass()) }
        })
    }

    fn wait(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        // SAFETY: it takes a number; a stream is a name to the library.
        checked(py, |symbols| unsafe { (symbols.glake_offload_wait)(self.id, stream.pass()) })
    }

    fn reload(&self, py: Python<'_>, stream: usize, address: usize) -> PyResult<()> {
        checked(py, |symbols| {
            // SAFETY: as of `begin`, and of `wait`.
            unsafe {
                match (symbols.glake_offload_reload)(self.id, address.pass(), stream.pass()) {
                    0 => (symbols.glake_offload_wait)(self.id, stream.pass()),
                    status => status,
                }
            }
        })
    }

    fn store(&self, py: Python<'_>, stream: usize, address: usize) -> PyResult<()> {
        checked(py, |symbols| {
            // SAFETY: as of `begin`.
            unsafe { (symbols.glake_offload_store)(self.id, address.pass(), stream.pass()) }
        })
    }

    fn host(&self, py: Python<'_>) -> PyResult<usize> {
        let mut host = 0;
        checked(py, |symbols| {
            let mut found = std::ptr::null_mut();
            // SAFETY: it writes one address to a place that is ours.
            let status = unsafe { (symbols.glake_offload_host)(self.id, &raw mut found) };
            host = found.expose_provenance();
            status
        })?;
        Ok(host)
    }

    fn __repr__(&self) -> String {
        format!("<glake._glake.Packed {}: {} bytes>", self.id, self.bytes)
    }
}

impl Drop for Packed {
    /// Releases the bytes without waiting; does nothing in a forked child and at the end of the process.
    fn drop(&mut self) {
        if let Ok(symbols) = symbols() {
            // SAFETY: it takes a number. It is known, so that there is no failure to tell anybody of.
            unsafe { (symbols.glake_offload_release)(self.id) };
        }
    }
}

#[pyfunction]
pub(crate) fn offload_begin(
    py: Python<'_>,
    stream: usize,
    address: usize,
    bytes: u64,
) -> PyResult<Option<Packed>> {
    let mut id = 0;
    let begun = checked(py, |symbols| {
        // SAFETY: the library looks the address up; a stream is a name to it. It writes one number to a place that is ours.
        unsafe { (symbols.glake_offload_begin)(address.pass(), bytes, stream.pass(), &raw mut id) }
    });
    packed(py, begun, id, bytes)
}

/// Reserves host memory, released when the object is dropped.
#[pyfunction]
pub(crate) fn offload_reserve(py: Python<'_>, device: i32, bytes: u64) -> PyResult<Packed> {
    let mut id = 0;
    // SAFETY: it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_offload_reserve)(device, bytes, &raw mut id) })?;
    Ok(Packed { id, bytes })
}

/// Begins an offload like `offload_begin`, for a save of a site that is to be checked for changes.
fn begin_checked(
    py: Python<'_>,
    (stream, address, bytes): (usize, usize, u64),
    site: u64,
    save: u64,
) -> PyResult<Option<Packed>> {
    let mut id = 0;
    let begun = checked(py, |symbols| {
        let (pointer, stream) = (address.pass(), stream.pass());
        // SAFETY: as of `offload_begin`.
        unsafe { (symbols.glake_offload_begin_checked)(pointer, bytes, stream, site, save, &raw mut id) }
    });
    packed(py, begun, id, bytes)
}

fn packed(py: Python<'_>, begun: PyResult<()>, id: u64, bytes: u64) -> PyResult<Option<Packed>> {
    match begun {
        Ok(()) => Ok(Some(Packed { id, bytes })),
        Err(error)
            if error.is_instance_of::<OutOfMemoryError>(py)
                || error.is_instance_of::<UnsupportedError>(py) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Maximum number of reloads returned by one call; others come with the next.
const ROOM: usize = 64;

/// Presets of a site and their numbers in the C interface.
const PRESETS: [(&str, i32); 3] = [("fit", 0), ("memory", 1), ("hybrid", 3)];

/// An offload site, released when the object is dropped.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Site {
    id: u64,
}

#[pymethods]
impl Site {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Site> {
        let mut id = 0;
        // SAFETY: it writes one number to a place that is ours.
        checked(py, |symbols| unsafe { (symbols.glake_offload_site_create)(&raw mut id) })?;
        Ok(Site { id })
    }

    #[pyo3(signature = (device, budget, preset))]
    fn ask(&self, py: Python<'_>, device: i32, budget: Option<u64>, preset: &str) -> PyResult<()> {
        let known = PRESETS.iter().find(|(name, _)| *name == preset);
        let (_, number) = known.ok_or_else(|| {
            InvalidError::new_err(format!("preset is {preset:?}: give one of fit, memory, hybrid"))
        })?;
        let budget = budget.unwrap_or(0);
        // SAFETY: it takes numbers.
        checked(py, |symbols| unsafe { (symbols.glake_offload_ask)(self.id, device, budget, *number) })
    }

    fn needs(&self, py: Python<'_>, shape: u64) -> PyResult<bool> {
        let mut needs = true;
        // SAFETY: it writes one value to a place that is ours.
        checked(py, |symbols| unsafe { (symbols.glake_offload_needs)(self.id, shape, &raw mut needs) })?;
        Ok(needs)
    }

    #[pyo3(signature = (course=false))]
    fn told_json(&self, py: Python<'_>, course: bool) -> PyResult<String> {
        // SAFETY: it takes a number; its answer is a text of ours to free, or null.
        written(py, |symbols| unsafe { (symbols.glake_offload_site_json)(self.id, course) })
    }

    #[pyo3(signature = (size, link_size=None, scope=-1, leaf=0, stream=0))]
    fn packed(
        &self,
        py: Python<'_>,
        size: u64,
        link_size: Option<u64>,
        scope: i64,
        leaf: u8,
        stream: usize,
    ) -> PyResult<(u64, i32, Vec<u64>)> {
        let (mut item, mut verdict, mut begin, mut count) = (0, 0, [0; ROOM], 0);
        checked(py, |symbols| {
            let (link_size, stream) = (link_size.unwrap_or(0), stream.pass());
            let pack = Pack { size, link_size, scope, leaf, stream };
            // SAFETY: it reads and writes places that are ours, and writes the list as often as is said; a stream is a name to it.
            unsafe {
                (symbols.glake_offload_packed)(
                    self.id,
                    &raw const pack,
                    &raw mut item,
                    &raw mut verdict,
                    begin.as_mut_ptr(),
                    ROOM,
                    &raw mut count,
                )
            }
        })?;
        Ok((item, verdict, begin[..count.min(ROOM)].to_vec()))
    }

    fn leaf_begins(&self, py: Python<'_>) -> PyResult<()> {
        // SAFETY: it takes a number.
        checked(py, |symbols| unsafe { (symbols.glake_offload_leaf_begins)(self.id) })
    }

    fn untimed(&self, py: Python<'_>) -> PyResult<()> {
        // SAFETY: it takes a number.
        checked(py, |symbols| unsafe { (symbols.glake_offload_untimed)(self.id) })
    }

    fn replays(&self, py: Python<'_>, scope: u32, begins: bool) -> PyResult<()> {
        // SAFETY: it takes numbers.
        checked(py, |symbols| unsafe { (symbols.glake_offload_replays)(self.id, scope, begins) })
    }

    fn unpacked(&self, py: Python<'_>, item: u64) -> PyResult<Vec<u64>> {
        let (mut begin, mut count) = ([0; ROOM], 0);
        checked(py, |symbols| {
            // SAFETY: as of `packed`.
            unsafe {
                (symbols.glake_offload_unpacked)(self.id, item, begin.as_mut_ptr(), ROOM, &raw mut count)
            }
        })?;
        Ok(begin[..count.min(ROOM)].to_vec())
    }

    fn freed(&self, py: Python<'_>, item: u64) -> PyResult<()> {
        // SAFETY: it takes two numbers.
        checked(py, |symbols| unsafe { (symbols.glake_offload_freed)(self.id, item) })
    }

    fn dropped(&self, py: Python<'_>, item: u64) -> PyResult<()> {
        // SAFETY: it takes two numbers.
        checked(py, |symbols| unsafe { (symbols.glake_offload_dropped)(self.id, item) })
    }

    fn stream(&self, py: Python<'_>, places: Vec<(u64, u32)>) -> PyResult<()> {
        let (bytes, blocks): (Vec<u64>, Vec<u32>) = places.into_iter().unzip();
        checked(py, |symbols| {
            // SAFETY: both lists are read as often as is said.
            unsafe { (symbols.glake_offload_stream)(self.id, bytes.as_ptr(), blocks.as_ptr(), bytes.len()) }
        })
    }

    /// Returns the weights to free and the weights to reload for a use. `count`: number of the site's weights.
    fn used(
        &self,
        py: Python<'_>,
        place: usize,
        phase: i32,
        first: bool,
        count: usize,
    ) -> PyResult<(Vec<u32>, Vec<u32>)> {
        let (mut places, mut left, mut begun) = (vec![0; 2 * count], 0, 0);
        checked(py, |symbols| {
            let (to, room) = (places.as_mut_ptr(), places.len());
            // SAFETY: it writes places that are ours, and the list as often as is said.
            unsafe {
                (symbols.glake_offload_used)(
                    self.id,
                    place,
                    phase,
                    first,
                    to,
                    room,
                    &raw mut left,
                    &raw mut begun,
                )
            }
        })?;
        places.truncate(left + begun);
        let begin = places.split_off(left);
        Ok((places, begin))
    }

    /// Returns the state of a save: 0 to be checked, 1 its bytes do not change, 2 they do.
    fn check(&self, py: Python<'_>, save: u64) -> PyResult<i32> {
        let mut state = 0;
        // SAFETY: it takes two numbers, and writes one to a place that is ours.
        checked(py, |symbols| unsafe { (symbols.glake_offload_check)(self.id, save, &raw mut state) })?;
        Ok(state)
    }

    fn offload_checked(
        &self,
        py: Python<'_>,
        stream: usize,
        address: usize,
        bytes: u64,
        save: u64,
    ) -> PyResult<Option<Packed>> {
        begin_checked(py, (stream, address, bytes), self.id, save)
    }

    fn __repr__(&self) -> String {
        format!("<glake._glake.Site {}>", self.id)
    }
}

impl Drop for Site {
    /// Releases the site without waiting; does nothing in a forked child and at the end of the process.
    fn drop(&mut self) {
        if let Ok(symbols) = symbols() {
            // SAFETY: it takes a number. It is known, so that there is no failure to tell anybody of.
            unsafe { (symbols.glake_offload_site_release)(self.id) };
        }
    }
}
