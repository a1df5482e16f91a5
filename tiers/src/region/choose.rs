//! Which extents go, and which come back: pure.

use glake_stitch::ExtentView;
use glake_units::Bytes;

use crate::place::Residency;

type Standing = (ExtentView, Residency);

/// Extents to shrink, at least `amount` of memory where there is so much: first what was interrupted, then what has a
/// copy already, then the rest; each in the order of addresses.
pub(super) fn to_leave(standing: &[Standing], amount: Bytes) -> Vec<ExtentView> {
    let rank = |residency: Residency| match residency {
        Residency::Interrupted { .. } => Some(0),
        Residency::Resident { copy: Some(_) } => Some(1),
        Residency::Resident { copy: None } => Some(2),
        _ => None,
    };
    chosen(standing, rank, |view| view.state != glake_stitch::ExtentState::Evicted, amount)
}

/// Extents to refill, at least `amount` of memory where so much is evicted: first what was interrupted; each in the order of
/// addresses.
pub(super) fn to_enter(standing: &[Standing], amount: Bytes) -> Vec<ExtentView> {
    let rank = |residency: Residency| match residency {
        Residency::Interrupted { .. } => Some(0),
        _ if residency.is_decommitted() => None,
        Residency::Evicted { .. } => Some(1),
        _ => None,
    };
    chosen(standing, rank, |_| true, amount)
}

fn chosen(
    standing: &[Standing],
    rank: impl Fn(Residency) -> Option<u8>,
    counts: impl Fn(&ExtentView) -> bool,
    amount: Bytes,
) -> Vec<ExtentView> {
    let ranked = standing.iter().filter_map(|(view, residency)| Some((rank(*residency)?, *view)));
    let mut ranked: Vec<(u8, ExtentView)> = ranked.collect();
    ranked.sort_by_key(|(rank, view)| (*rank, view.offset));
    let mut left = amount;
    let views = ranked.into_iter().map(|(_, view)| view);
    views
        .take_while(|view| {
            let takes = !left.is_zero();
            if counts(view) {
                left = left.saturating_sub(view.size);
            }
            takes
        })
        .collect()
}
