//! A site that offloads, owned by an object of Python.

use pyo3::prelude::*;

use crate::error::checked;
use crate::library::symbols;
use crate::offload::{Packed, begin_checked};

/// So many reloads are told with one call; others come with the next.
const ROOM: usize = 64;

/// A site, until it is dropped.
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

    fn packed(&self, py: Python<'_>, bytes: u64) -> PyResult<(u64, bool, Vec<u64>)> {
        let (mut item, mut is_offloaded, mut begin, mut count) = (0, 0, [0; ROOM], 0);
        checked(py, |symbols| {
            // SAFETY: it writes to places that are ours, and to the list as often as is said.
            unsafe {
                (symbols.glake_offload_packed)(
                    self.id,
                    bytes,
                    &raw mut item,
                    &raw mut is_offloaded,
                    begin.as_mut_ptr(),
                    ROOM,
                    &raw mut count,
                )
            }
        })?;
        Ok((item, is_offloaded != 0, begin[..count.min(ROOM)].to_vec()))
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

    /// What is known of a save: 0 it is to be checked, 1 its bytes do not change, 2 they do.
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
    /// Waits for nothing; in a forked child and at the end of the process the library does nothing.
    fn drop(&mut self) {
        if let Ok(symbols) = symbols() {
            // SAFETY: it takes a number. It is known, so that there is no failure to tell anybody of.
            unsafe { (symbols.glake_offload_site_release)(self.id) };
        }
    }
}
