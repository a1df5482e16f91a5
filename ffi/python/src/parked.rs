//! Safe points of threads and tasks.

use pyo3::prelude::*;

use crate::library::{Functions, symbols};

/// Time between two checks for signals while a thread waits.
const SLICE_MS: i64 = 100;

/// A `with` block in which the uses that a shrink waits for are at a safe point. Its beginning marks the safe point, and its end waits
/// until all their memory is back. Uses that vote are asked inside the block before any memory moves; leaving it without a vote counts as a
/// no. Python runs signal handlers between any two of its lines; as native methods, begin and end cannot be interrupted, whatever is raised
/// inside the block.
#[pyclass]
pub(crate) struct Parked {
    uses: Vec<u64>,
    /// Uses that have arrived and not continued yet.
    waiting: Vec<u64>,
    /// Whether no memory of the uses may move before they have voted.
    votes: bool,
    /// Called repeatedly while a thread waits; its argument tells whether a signal or an exception requests the memory back.
    meanwhile: Py<PyAny>,
}

#[pymethods]
impl Parked {
    #[new]
    #[pyo3(signature = (uses, meanwhile, votes = false))]
    fn new(uses: Vec<u64>, meanwhile: Py<PyAny>, votes: bool) -> Parked {
        Parked { uses, waiting: Vec::new(), votes, meanwhile }
    }

    /// Arrives at the safe point with all uses. Returns whether any has to wait.
    fn __enter__(&mut self) -> PyResult<bool> {
        let symbols = symbols()?;
        let arrive = if self.votes { symbols.glake_vote_arrive } else { symbols.glake_safepoint_arrive };
        // SAFETY: it takes a number, and waits for nothing.
        let arrives = |number: &&u64| unsafe { arrive(**number) } != 0;
        self.waiting = self.uses.iter().filter(arrives).copied().collect();
        Ok(!self.waiting.is_empty())
    }

    /// Returns whether all uses have continued by now. Never waits.
    fn have_gone_on(&mut self) -> PyResult<bool> {
        let symbols = symbols()?;
        self.waiting.retain(|&number| !goes_on(symbols, number, 0));
        Ok(self.waiting.is_empty())
    }

    /// Waits at most `timeout_ms` for the votes to be asked: 0 not yet, 1 all are asked, -1 a shrink has ended.
    fn asked(&self, py: Python<'_>, timeout_ms: i64) -> PyResult<i32> {
        let symbols = symbols()?;
        // SAFETY: it takes two numbers.
        let ask = |number: &u64| unsafe { (symbols.glake_vote_asked)(*number, timeout_ms) };
        Ok(py.detach(|| self.waiting.iter().map(ask).min().unwrap_or(-1)))
    }

    /// Votes for all waiting uses. Returns whether all votes count; uses that voted no continue.
    fn vote(&mut self, yes: bool) -> PyResult<bool> {
        let symbols = symbols()?;
        self.votes = false;
        // SAFETY: it takes a number and whether.
        let heard = |number: &u64| unsafe { (symbols.glake_vote_cast)(*number, yes) } != 0;
        let (told, waiting): (Vec<u64>, Vec<u64>) = self.waiting.iter().partition(|number| heard(number));
        let all = waiting.is_empty();
        self.waiting = if yes { [told, waiting].concat() } else { waiting };
        Ok(all)
    }

    /// Waits for the remaining uses. An exception raised by a signal handler meanwhile requests the memory back, and is raised once it is.
    fn __exit__(
        &mut self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let symbols = symbols()?;
        if self.votes {
            self.vote(false)?;
        }
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
