//! Selection of the extents to evict and to refill: pure.

use glake_stitch::ExtentView;
use glake_units::Bytes;

use crate::place::Residency;

type Standing = (ExtentView, Residency);

/// Selects extents to evict, at least `amount` bytes if available: first interrupted ones, then those with a copy, then the rest, each in
/// address order.
pub(super) fn to_leave(standing: &[Standing], amount: Bytes) -> Vec<ExtentView> {
    let rank = |residency: Residency| match residency {
        Residency::Interrupted { .. } => Some(0),
        Residency::Resident { copy: Some(_) } => Some(1),
        Residency::Resident { copy: None } => Some(2),
        _ => None,
    };
    chosen(standing, rank, |view| view.state != glake_stitch::ExtentState::Evicted, amount)
}

/// Selects extents to refill, at least `amount` bytes if that many are evicted: first interrupted ones, then the rest, each in address
/// order.
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
