//! Rendering of panels to SVG.

use glake_units::Bytes;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    ChartBuilder, ChartContext, DrawingArea, DrawingBackend, IntoDrawingArea, LineSeries, PathElement,
    Polygon, Rectangle, SVGBackend,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color as _, FontStyle, IntoFont, RGBColor, TextStyle, WHITE};

use super::palette::{GRID, INK, LIVE, LIVE_FILL, MUTED, colour};
use super::{Curve, Panel, PlotError};
use crate::Point;

pub(super) const WIDTH: u32 = 1280;
pub(super) const PANEL: u32 = 430;
/// Width of the legend in pixels.
pub(super) const LEGEND: u32 = 270;
pub(super) const MARGIN: u32 = 24;
pub(super) const TITLE: u32 = 52;
const FONT: &str = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> =
    ChartContext<'a, SVGBackend<'b>, plotters::coord::cartesian::Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Renders the picture as SVG text.
pub(super) fn svg(panels: &[Panel]) -> Result<String, PlotError> {
    let height = u32::try_from(panels.len())
        .ok()
        .filter(|count| *count > 0)
        .and_then(|count| count.checked_mul(PANEL))
        .ok_or(PlotError::Empty)?;
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE).map_err(undrawable)?;
        for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
            draw(area, panel)?;
        }
        root.present().map_err(undrawable)?;
    }
    Ok(text)
}

pub(super) fn undrawable(error: impl std::fmt::Display) -> PlotError {
    PlotError::Undrawable { reason: error.to_string() }
}

/// Conversion of a panel's figures to coordinates.
struct Scale {
    begin_us: u64,
    unit: f64,
    unit_name: &'static str,
}

#[allow(clippy::cast_precision_loss)] // a picture shows fewer digits than a double has
impl Scale {
    fn of(panel: &Panel) -> Self {
        let (unit, unit_name) =
            if panel.peak() >= Bytes::gib(1) { (Bytes::gib(1), "GiB") } else { (Bytes::mib(1), "MiB") };
        Scale { begin_us: panel.begin_us, unit: unit.get() as f64, unit_name }
    }

    fn seconds(&self, at_us: u64) -> f64 {
        at_us.saturating_sub(self.begin_us) as f64 / 1e6
    }

    fn memory(&self, bytes: Bytes) -> f64 {
        bytes.get() as f64 / self.unit
    }

    /// Converts points to a step curve. A point describes the interval that it ends, so its height applies from the previous point on.
    fn steps(&self, points: &[Point], of: impl Fn(&Point) -> Bytes) -> Vec<(f64, f64)> {
        let mut steps: Vec<(f64, f64)> = Vec::with_capacity(points.len() * 2);
        let mut level = None;
        for point in points {
            let (x, y) = (self.seconds(point.at_us), self.memory(of(point)));
            let from = steps.last().map_or(0.0, |(before, _)| *before);
            match steps.last_mut() {
                Some(last) if level == Some(y.to_bits()) => last.0 = x,
                _ => steps.extend([(from, y), (x, y)]),
            }
            level = Some(y.to_bits());
        }
        steps
    }
}

fn draw(area: &Area<'_>, panel: &Panel) -> Result<(), PlotError> {
    let scale = Scale::of(panel);
    let (chart_area, legend_area) = area.split_horizontally(WIDTH - LEGEND);
    let (end, top) = (scale.seconds(panel.end_us()), scale.memory(panel.peak()) * 1.06);
    let (end, top) = (if end > 0.0 { end } else { 1.0 }, if top > 0.0 { top } else { 1.0 });

    let mut chart = ChartBuilder::on(&chart_area)
        .margin(MARGIN)
        .margin_top(TITLE)
        .margin_right(0)
        .x_label_area_size(46)
        .y_label_area_size(62)
        .build_cartesian_2d(0.0..end, 0.0..top)
        .map_err(undrawable)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(GRID)
        .max_light_lines(0)
        .axis_style(MUTED)
        .x_labels(10)
        .y_labels(7)
        .x_label_formatter(&|x| tick(*x, end))
        .y_label_formatter(&|y| tick(*y, top))
        .x_desc("seconds")
        .y_desc(scale.unit_name)
        .label_style(font(14, MUTED))
        .axis_desc_style(font(15, INK))
        .draw()
        .map_err(undrawable)?;

    let live = scale.steps(panel.live().1, |point| point.active);
    if let (Some(first), Some(last)) = (live.first(), live.last()) {
        let outline = [(first.0, 0.0)].into_iter().chain(live.iter().copied()).chain([(last.0, 0.0)]);
        let shape = Polygon::new(outline.collect::<Vec<_>>(), LIVE_FILL.filled());
        chart.draw_series([shape]).map_err(undrawable)?;
    }
    // A momentary peak has no area: the line shows it.
    line(&mut chart, live, LIVE, 1)?;
    // The first curve of the legend is drawn on top.
    for (curve, ink) in inks(panel).into_iter().rev() {
        line(&mut chart, scale.steps(&curve.points, |point| point.reserved), ink, width_of(curve))?;
    }
    area.draw_text(&panel.title, &bold(22, INK), (i32_of(MARGIN), 16)).map_err(undrawable)?;
    legend(&legend_area, panel, &scale)
}

fn line(
    chart: &mut Chart<'_, '_>,
    points: Vec<(f64, f64)>,
    ink: RGBColor,
    width: u32,
) -> Result<(), PlotError> {
    chart.draw_series(LineSeries::new(points, ink.stroke_width(width))).map(|_| ()).map_err(undrawable)
}

/// Returns each curve with its colour.
fn inks(panel: &Panel) -> Vec<(&Curve, RGBColor)> {
    let curves = &panel.curves;
    curves
        .iter()
        .enumerate()
        .map(|(place, curve)| {
            let nth = curves[..place].iter().filter(|before| before.policy == curve.policy).count();
            (curve, colour(&curve.policy, nth))
        })
        .collect()
}

fn width_of(curve: &Curve) -> u32 {
    if curve.policy == "glake" { 3 } else { 2 }
}

/// Draws the legend: policy and peak of each curve, then the live memory.
fn legend<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    panel: &Panel,
    scale: &Scale,
) -> Result<(), PlotError> {
    let right = i32_of(LEGEND - MARGIN);
    let figure = |bytes: Bytes| format!("{:.2} {}", scale.memory(bytes), scale.unit_name);
    let entry = |y: i32, name: &str, peak: Bytes| {
        let to_the_right = font(15, INK).pos(Pos::new(HPos::Right, VPos::Center));
        area.draw_text(name, &font(15, INK).pos(Pos::new(HPos::Left, VPos::Center)), (54, y))?;
        area.draw_text(&figure(peak), &to_the_right, (right, y))
    };
    let mut y = i32_of(TITLE) + 8;
    let head = font(13, MUTED).pos(Pos::new(HPos::Left, VPos::Center));
    let head_right = font(13, MUTED).pos(Pos::new(HPos::Right, VPos::Center));
    area.draw_text("reserved", &head, (20, y)).map_err(undrawable)?;
    area.draw_text("peak", &head_right, (right, y)).map_err(undrawable)?;
    for (curve, ink) in inks(panel) {
        y += 28;
        let key = PathElement::new(vec![(20, y), (44, y)], ink.stroke_width(width_of(curve) + 1));
        area.draw(&key).map_err(undrawable)?;
        let name = match curve.variant.as_str() {
            "" => curve.policy.clone(),
            variant => format!("{}, {variant}", curve.policy),
        };
        entry(y, &name, curve.peak).map_err(undrawable)?;
    }
    y += 28;
    area.draw(&Rectangle::new([(20, y - 7), (44, y + 7)], LIVE_FILL.filled())).map_err(undrawable)?;
    entry(y, "live", panel.live().0).map_err(undrawable)
}

pub(super) fn font(size: i32, ink: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&ink)
}

pub(super) fn bold(size: i32, ink: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().style(FontStyle::Bold).color(&ink)
}

/// Formats a tick with as many digits as distinguish it from the next one.
fn tick(value: f64, range: f64) -> String {
    match range {
        r if r >= 8.0 => format!("{value:.0}"),
        r if r >= 0.8 => format!("{value:.1}"),
        r if r >= 0.08 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

pub(super) fn i32_of(pixels: u32) -> i32 {
    i32::try_from(pixels).unwrap_or(i32::MAX)
}
