//! Attribution of GPU memory outside the pool, as far as it can be known.
//!
//! ```text
//! in use ─┬ pool, relays: reported by their owners
//!         └ others ─► imported ─► before the pool started ─► page tables of pinned memory ─► since
//! ```
//!
//! Invariant: the parts add up to the whole, whatever is assumed of each.

use glake_units::Bytes;

/// Pinned host memory for which the driver allocates one page of tables on each GPU with a context. Measured on an H200.
const PINNED: u64 = Bytes::gib(1).get();
const TABLES: Bytes = Bytes::mib(2);

/// Known parts of the memory outside the pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    /// Memory of other processes that is mapped here.
    pub(super) imported: Bytes,
    /// Memory in use on the GPU when its pool started.
    pub(super) before: Bytes,
    /// Host memory pinned by this library.
    pub(super) pinned: Bytes,
}

/// Estimates the memory of a GPU for page tables of pinned host memory.
fn tables(pinned: Bytes) -> Bytes {
    Bytes::new(pinned.get().div_ceil(PINNED).saturating_mul(TABLES.get()))
}

/// Splits the memory in use by holder, with a description of each.
pub(super) fn holders(given_out: Bytes, known: Known) -> [(&'static str, Bytes); 4] {
    let mut rest = given_out;
    let mut take = |most: Bytes| {
        let taken = most.min(rest);
        rest = rest.saturating_sub(taken);
        taken
    };
    // The time at which imported memory was created is unknown: it counts as neither.
    let imported = take(known.imported);
    let before = take(known.before);
    let tables = take(tables(known.pinned));
    [
        ("imported: memory of other processes that is open here", imported),
        (
            "taken before the pool started: contexts, modules and other libraries of this process, and other processes",
            before,
        ),
        ("about: the driver's page tables of pinned host memory, 2 MiB for each GiB", tables),
        (
            "taken since by others: contexts, modules and other libraries of this process, and other processes",
            rest,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up_and_tables_are_rounded_up() {
        let known = Known { imported: Bytes::mib(100), before: Bytes::mib(500), pinned: Bytes::gib(16) };
        let amounts = |given_out, known| holders(given_out, known).map(|(_, bytes)| bytes.get() >> 20);
        assert_eq!(amounts(Bytes::mib(700), known), [100, 500, 32, 68]);
        assert_eq!(amounts(Bytes::mib(610), known), [100, 500, 10, 0]);
        assert_eq!(amounts(Bytes::mib(90), known), [90, 0, 0, 0]);
        let one = Known { pinned: Bytes::new(1), ..Known::default() };
        assert_eq!(amounts(Bytes::mib(700), one), [0, 0, 2, 698]);
        assert_eq!(tables(Bytes::ZERO), Bytes::ZERO);
        assert_eq!(tables(Bytes::new(PINNED + 1)), Bytes::mib(4));
    }
}
