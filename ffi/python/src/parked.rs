//! A thread or task at a safe point.

use pyo3::prelude::*;

use crate::library::{Functions, symbols};

/// How long a thread waits at a time before it looks whether a signal came.
const SLICE_MS: i64 = 100;

/// A `with` block in which the uses that a shrink waits for stand at a safe point: it begins by saying so, and ends when all their memory
/// is back. Those that vote are asked inside of the block before anything moves; who leaves it without a vote is against it. Python runs a signal's handler between any two of its lines; none of these is between the two, whatever is raised inside.
#[pyclass]
pub(crate) struct Parked {
    uses: Vec<u64>,
    /// Those that have arrived and not gone on.
    waiting: Vec<u64>,
    /// Nothing of them moves before they have voted.
    votes: bool,
    /// Called now and then while a thread waits: whether something asks for the memory, a signal or an exception.
    meanwhile: Py<PyAny>,
}

#[pymethods]
impl Parked {
    #[new]
    #[pyo3(signature = (uses, meanwhile, votes = false))]
    fn new(uses: Vec<u64>, meanwhile: Py<PyAny>, votes: bool) -> Parked {
        Parked { uses, waiting: Vec::new(), votes, meanwhile }
    }

    /// Whether any use has to wait.
    fn __enter__(&mut self) -> PyResult<bool> {
        let symbols = symbols()?;
        let arrive = if self.votes { symbols.glake_vote_arrive } else { symbols.glake_safepoint_arrive };
        // SAFETY: it takes a number, and waits for nothing.
        let arrives = |number: &&u64| unsafe { arrive(**number) } != 0;
        self.waiting = self.uses.iter().filter(arrives).copied().collect();
        Ok(!self.waiting.is_empty())
    }

    /// Whether all have gone on by now. Never waits.
    fn have_gone_on(&mut self) -> PyResult<bool> {
        let symbols = symbols()?;
        self.waiting.retain(|&number| !goes_on(symbols, number, 0));
        Ok(self.waiting.is_empty())
    }

    /// Whether all that wait are asked for their votes, after so long at most: 0 not yet, 1 they are, -1 a shrink is over.
    fn asked(&self, py: Python<'_>, timeout_ms: i64) -> PyResult<i32> {
        let symbols = symbols()?;
        // SAFETY: it takes two numbers.
        let ask = |number: &u64| unsafe { (symbols.glake_vote_asked)(*number, timeout_ms) };
        Ok(py.detach(|| self.waiting.iter().map(ask).min().unwrap_or(-1)))
    }

    /// Votes for all that wait. Whether all are heard; those against it go on.
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

    /// Waits for those that have not. What signals raise meanwhile asks for the memory, and comes when it is back.
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
