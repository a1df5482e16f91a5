//! Orders in which items leave the GPU, by the memory they free and the cost.

use super::Verdict;
use super::course::{Course, Span};
use super::curve::Curve;

/// Items that may be recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arms {
    /// No items: all of them are stored.
    Stored,
    /// Items of whole scopes.
    Scopes,
    /// Single leaves, and with any of them the items between leaves.
    Leaves,
}

/// Parameters of an order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    /// Share of the copies that are offloaded rather than recomputed, for items that allow both.
    pub(crate) offloaded: f64,
    /// Weight of a copy's time relative to that of recomputing.
    pub(crate) price: f64,
    /// Additional weight of a copy whose item is away for a short time.
    pub(crate) haste: f64,
}

/// Items in order, each with its verdict when it leaves.
pub(crate) type Order = Vec<(usize, Verdict)>;

/// Input common to all orders.
#[derive(Clone, Debug)]
pub(crate) struct Values {
    /// Bytes freed in cells above the budget; 0: none.
    value: Vec<f64>,
    /// Shortness of each item's absence, from 0 to 1.
    haste: Vec<f64>,
    /// Units that can be recomputed, those that save the most link time first.
    units: Vec<(f64, Vec<usize>)>,
    recomputable: f64,
}

impl Values {
    /// Creates the input; `kept` is the curve with everything kept.
    pub(crate) fn new(course: &Course, kept: &Curve, budget: i64, arms: Arms) -> Self {
        let mut over = Vec::with_capacity(course.cells + 1);
        let mut sum = 0.0;
        over.push(sum);
        for cell in kept.cells() {
            sum += excess(*cell, budget);
            over.push(sum);
        }
        let value = course.items.iter().map(|item| {
            let freed: f64 = course.freed(item).iter().map(|(from, until)| over[*until] - over[*from]).sum();
            if sum > 0.0 { freed / sum * excess(item.bytes, 0) } else { 0.0 }
        });
        let time = |item: &Span| {
            let [(from, until), _] = course.freed(item);
            course.begins[until] - course.begins[from]
        };
        let longest = course.items.iter().map(time).fold(0.0, f64::max).max(1e-9);
        let haste = course.items.iter().map(|item| 1.0 - time(item) / longest);
        let mut values =
            Values { value: value.collect(), haste: haste.collect(), units: Vec::new(), recomputable: 0.0 };
        values.units = values.units(course, arms);
        values.recomputable = values.units.iter().map(|(_, unit)| values.copies(course, unit)).sum();
        values
    }

    /// Returns whether anything may be recomputed.
    pub(crate) fn recomputes(&self) -> bool {
        !self.units.is_empty()
    }

    fn copies(&self, course: &Course, unit: &[usize]) -> f64 {
        unit.iter().map(|item| course.items[*item].out + course.items[*item].into).sum()
    }

    fn units(&self, course: &Course, arms: Arms) -> Vec<(f64, Vec<usize>)> {
        let mut units: Vec<Vec<usize>> = Vec::new();
        for scope in &course.scopes {
            let (inner, leaves): (Vec<usize>, Vec<usize>) =
                scope.items.iter().partition(|item| course.items[**item].inner);
            match arms {
                Arms::Stored => {}
                Arms::Scopes => units.push(scope.items.clone()),
                Arms::Leaves => {
                    units.push(inner);
                    units.extend(leaves.into_iter().map(|leaf| vec![leaf]));
                }
            }
        }
        units.retain(|unit| !unit.is_empty());
        let gain = |unit: &Vec<usize>| {
            let time: f64 = unit.iter().filter_map(|item| course.items[*item].recompute).sum();
            let haste = unit.iter().map(|item| self.haste[*item]).fold(0.0, f64::max);
            time / self.copies(course, unit).max(1e-9) / (1.0 + haste)
        };
        let mut units: Vec<_> = units.into_iter().map(|unit| (gain(&unit), unit)).collect();
        units.sort_by(|(left, _), (right, _)| right.total_cmp(left));
        units
    }

    /// Returns the items by increasing cost per byte freed.
    pub(crate) fn order(&self, course: &Course, recipe: &Recipe) -> Order {
        let mut leaves = vec![Verdict::Offload; course.items.len()];
        let mut cost: Vec<f64> = course
            .items
            .iter()
            .zip(&self.haste)
            .map(|(item, haste)| recipe.price * (item.out + item.into) * (1.0 + recipe.haste * haste))
            .collect();
        let (mut copies, limit) = (0.0, recipe.offloaded * self.recomputable);
        for (_, unit) in &self.units {
            copies += self.copies(course, unit);
            if copies <= limit * (1.0 + 1e-9) {
                continue;
            }
            // One density for the whole unit, so that it leaves together.
            let time: f64 = unit.iter().filter_map(|item| course.items[*item].recompute).sum();
            let value: f64 = unit.iter().map(|item| self.value[*item]).sum();
            for &item in unit {
                leaves[item] = Verdict::Recompute;
                cost[item] = time * self.value[item] / value.max(1e-9);
            }
        }
        let mut order: Vec<(f64, usize)> = (0..course.items.len())
            .filter(|item| self.value[*item] > 0.0)
            .map(|item| (cost[item] / self.value[item], item))
            .collect();
        order.sort_unstable_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
        order.into_iter().map(|(_, item)| (item, leaves[item])).collect()
    }
}

/// Extends verdicts to inseparable items: whole scopes, or the items between leaves.
pub(crate) fn together(course: &Course, arms: Arms, verdicts: &mut [Verdict]) {
    for scope in &course.scopes {
        if scope.items.iter().any(|item| verdicts[*item] == Verdict::Recompute) {
            for &item in scope.items.iter().filter(|item| arms == Arms::Scopes || course.items[**item].inner)
            {
                verdicts[item] = Verdict::Recompute;
            }
        }
    }
}

#[allow(clippy::cast_precision_loss)] // bytes
fn excess(bytes: i64, budget: i64) -> f64 {
    (bytes - budget).max(0) as f64
}
