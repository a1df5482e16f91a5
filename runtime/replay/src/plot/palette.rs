//! Colours of the policies, chosen to be distinguishable for colour-blind readers and on paper (after Okabe and Ito).

use plotters::style::RGBColor;

/// Colour of text and axes.
pub(super) const INK: RGBColor = RGBColor(38, 43, 51);
/// Colour of secondary text.
pub(super) const MUTED: RGBColor = RGBColor(107, 114, 128);
/// Colour of the grid lines.
pub(super) const GRID: RGBColor = RGBColor(232, 234, 238);
/// Outline of the live memory.
pub(super) const LIVE: RGBColor = RGBColor(170, 177, 188);
/// Fill of the live memory.
pub(super) const LIVE_FILL: RGBColor = RGBColor(219, 222, 228);

const GLAKE: [RGBColor; 4] =
    [RGBColor(0, 95, 178), RGBColor(70, 160, 225), RGBColor(0, 52, 98), RGBColor(140, 200, 240)];
const GMLAKE: RGBColor = RGBColor(0, 148, 108);
const EXPANDABLE: RGBColor = RGBColor(230, 159, 0);
const CACHING: RGBColor = RGBColor(208, 84, 0);
const OTHER: RGBColor = RGBColor(178, 92, 148);

/// Returns the colour of the `nth` curve of a policy in a panel.
pub(super) fn colour(policy: &str, nth: usize) -> RGBColor {
    match policy {
        "glake" => GLAKE[nth % GLAKE.len()],
        "gmlake" => GMLAKE,
        "expandable" => EXPANDABLE,
        "caching" | "start-stop" => CACHING,
        "glake-no-preempt" => GLAKE[1],
        "drain" => GMLAKE,
        "drain-per-tensor" => EXPANDABLE,
        "static" => MUTED,
        _ => OTHER,
    }
}
