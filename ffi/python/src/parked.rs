//! A thread or task at a safe point.

use pyo3::prelude::*;

use crate::library::{Functions, symbols};

/// How long a thread waits at a time before it looks whether a signal came.
const SLICE_MS: i64 = 100;

/// A `with` block in which the uses that a shrink waits for stand at a safe point: it begins by saying so, and ends when all their memory
/// is back. Python runs a signal's handler between any two of its lines; none of these is between the two, whatever is raised inside.
#[pyclass]
pub(crate) struct Parked {
    uses: Vec<u64>,
    /// Those that have arrived and not gone on.
    waiting: Vec<u64>,
    /// Called now and then while a thread waits: whether something asks for the memory, a signal or an exception.
    meanwhile: Py<PyAny>,
}

#[pymethods]
impl Parked {
    #[new]
    fn new(uses: Vec<u64>, meanwhile: Py<PyAny>) -> Parked {
        Parked { uses, waiting: Vec::new(), meanwhile }
    }

    /// Whether any use has to wait.
    fn __enter__(&mut self) -> PyResult<bool> {
        let symbols = symbols()?;
        // SAFETY: it takes a number, and waits for nothing.
        let arrives = |number: &&u64| unsafe { (symbols.glake_safepoint_arrive)(**number) } != 0;
        self.waiting = self.uses.iter().filter(arrives).copied().collect();
        Ok(!self.waiting.is_empty())
    }

    /// Whether all have gone on by now. Never waits.
    fn have_gone_on(&mut self) -> PyResult<bool> {
        let symbols = symbols()?;
        self.waiting.retain(|&number| !goes_on(symbols, number, 0));
        Ok(self.waiting.is_empty())
    }

    /// Waits for those that have not. What signals raise meanwhile asks for the memory, and comes when it is back.
    fn __exit__(
        &mut self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let symbols = symbols()?;
        let (mut asks, mut raised) = (!kind.is_none(), None);
        while let Some(&number) = self.waiting.last() {
            if py.detach(|| goes_on(symbols, number, SLICE_MS)) {
                self.waiting.pop();
                continue;
            }
            let heard = py.check_signals().and_then(|()| self.meanwhile.call1(py, (asks,)).map(|_| ()));
            if let Err(error) = heard {
                asks = true;
                raised = Some(error);
            }
        }
        raised.map_or(Ok(false), Err)
    }
}

fn goes_on(symbols: &Functions, number: u64, timeout_ms: i64) -> bool {
    // SAFETY: it takes two numbers.
    unsafe { (symbols.glake_safepoint_go_on)(number, timeout_ms) != 0 }
}
