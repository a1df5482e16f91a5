//! Rendering of panels and distributions to SVG.

use glake_units::Bytes;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    ChartBuilder, ChartContext, DrawingArea, IntoDrawingArea, LineSeries, PathElement, Polygon, Rectangle,
    SVGBackend,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color as _, FontStyle, IntoFont, RGBColor, ShapeStyle, TextStyle, WHITE};

use super::{Curve, Panel, PlotError};
use crate::Point;

const WIDTH: u32 = 1280;
const PANEL: u32 = 430;
/// Width of the legend in pixels.
const LEGEND: u32 = 270;
const MARGIN: u32 = 24;
const TITLE: u32 = 52;
const FONT: &str = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> =
    ChartContext<'a, SVGBackend<'b>, plotters::coord::cartesian::Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Renders panels, one below the other, as SVG text.
pub(super) fn svg(panels: &[Panel]) -> Result<String, PlotError> {
    let titles: Vec<&str> = panels.iter().map(|panel| &*panel.title).collect();
    picture(&titles, |number, area| draw(area, &panels[number]))
}

/// Renders one area per title, one below the other, as SVG text. `draw` fills the area of the given number.
fn picture(
    titles: &[&str],
    draw: impl Fn(usize, &Area<'_>) -> Result<(), PlotError>,
) -> Result<String, PlotError> {
    let height = u32::try_from(titles.len())
        .ok()
        .filter(|count| *count > 0)
        .and_then(|count| count.checked_mul(PANEL));
    let height = height.ok_or(PlotError::Empty)?;
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE).map_err(undrawable)?;
        for (number, area) in root.split_evenly((titles.len(), 1)).iter().enumerate() {
            draw(number, area)?;
            area.draw_text(titles[number], &bold(22, INK), (i32_of(MARGIN), 16)).map_err(undrawable)?;
        }
        root.present().map_err(undrawable)?;
    }
    Ok(text)
}

/// Axis of a chart: range, name, number of labels and their texts.
type Axis<'a> = (std::ops::Range<f64>, &'a str, usize, &'a dyn Fn(&f64) -> String);

/// Draws axes and horizontal grid lines; vertical ones if requested.
fn axes<'a, 'b>(
    area: &'a Area<'b>,
    x: Axis<'_>,
    y: Axis<'_>,
    vertical_lines: bool,
) -> Result<Chart<'a, 'b>, PlotError> {
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .margin_top(TITLE)
        .margin_right(0)
        .x_label_area_size(46)
        .y_label_area_size(62)
        .build_cartesian_2d(x.0, y.0)
        .map_err(undrawable)?;
    let mut mesh = chart.configure_mesh();
    if !vertical_lines {
        mesh.disable_x_mesh();
    }
    mesh.bold_line_style(GRID)
        .max_light_lines(0)
        .axis_style(MUTED)
        .x_labels(x.2)
        .y_labels(y.2)
        .x_label_formatter(&x.3)
        .y_label_formatter(&y.3)
        .x_desc(x.1)
        .y_desc(y.1)
        .label_style(font(14, MUTED))
        .axis_desc_style(font(15, INK))
        .draw()
        .map_err(undrawable)?;
    drop(mesh);
    Ok(chart)
}

/// Legend at the right of a chart: rows of a key, a name and a figure.
struct Legend<'a, 'b> {
    area: &'a Area<'b>,
    /// Vertical position of the last row.
    y: i32,
}

impl<'a, 'b> Legend<'a, 'b> {
    fn new(area: &'a Area<'b>, name: &str, figure: &str) -> Result<Self, PlotError> {
        let legend = Legend { area, y: i32_of(TITLE) + 8 };
        legend.text(20, name, figure, 13, MUTED)?;
        Ok(legend)
    }

    /// Adds a row and returns its vertical position, for the key at its left.
    fn row(&mut self, name: &str, figure: &str) -> Result<i32, PlotError> {
        self.y += 28;
        self.text(54, name, figure, 15, INK).map(|()| self.y)
    }

    /// Adds the row of a line.
    fn line(&mut self, ink: ShapeStyle, name: &str, figure: &str) -> Result<(), PlotError> {
        let y = self.row(name, figure)?;
        self.area.draw(&PathElement::new(vec![(20, y), (44, y)], ink)).map_err(undrawable)
    }

    fn text(&self, x: i32, name: &str, figure: &str, size: i32, ink: RGBColor) -> Result<(), PlotError> {
        let style = |side| font(size, ink).pos(Pos::new(side, VPos::Center));
        self.area.draw_text(name, &style(HPos::Left), (x, self.y)).map_err(undrawable)?;
        let right = (i32_of(LEGEND - MARGIN), self.y);
        self.area.draw_text(figure, &style(HPos::Right), right).map_err(undrawable)
    }
}

fn undrawable(error: impl std::fmt::Display) -> PlotError {
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

    let seconds: Axis<'_> = (0.0..end, "seconds", 10, &|x| tick(*x, end));
    let memory: Axis<'_> = (0.0..top, scale.unit_name, 7, &|y| tick(*y, top));
    let mut chart = axes(&chart_area, seconds, memory, false)?;

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
fn legend(area: &Area<'_>, panel: &Panel, scale: &Scale) -> Result<(), PlotError> {
    let figure = |bytes: Bytes| format!("{:.2} {}", scale.memory(bytes), scale.unit_name);
    let mut legend = Legend::new(area, "reserved", "peak")?;
    for (curve, ink) in inks(panel) {
        let name = match curve.variant.as_str() {
            "" => curve.policy.clone(),
            variant => format!("{}, {variant}", curve.policy),
        };
        legend.line(ink.stroke_width(width_of(curve) + 1), &name, &figure(curve.peak))?;
    }
    let y = legend.row("live", &figure(panel.live().0))?;
    area.draw(&Rectangle::new([(20, y - 7), (44, y + 7)], LIVE_FILL.filled())).map_err(undrawable)
}

fn font(size: i32, ink: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&ink)
}

fn bold(size: i32, ink: RGBColor) -> TextStyle<'static> {
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

fn i32_of(pixels: u32) -> i32 {
    i32::try_from(pixels).unwrap_or(i32::MAX)
}

/// Colour of text and axes.
const INK: RGBColor = RGBColor(38, 43, 51);
/// Colour of secondary text.
const MUTED: RGBColor = RGBColor(107, 114, 128);
/// Colour of the grid lines.
const GRID: RGBColor = RGBColor(232, 234, 238);
/// Outline of the live memory.
const LIVE: RGBColor = RGBColor(170, 177, 188);
/// Fill of the live memory.
const LIVE_FILL: RGBColor = RGBColor(219, 222, 228);

const GLAKE: [RGBColor; 4] =
    [RGBColor(0, 95, 178), RGBColor(70, 160, 225), RGBColor(0, 52, 98), RGBColor(140, 200, 240)];
const GMLAKE: RGBColor = RGBColor(0, 148, 108);
const EXPANDABLE: RGBColor = RGBColor(230, 159, 0);
const CACHING: RGBColor = RGBColor(208, 84, 0);
const OTHER: RGBColor = RGBColor(178, 92, 148);

/// Returns the colour of the `nth` curve of a policy in a panel.
fn colour(policy: &str, nth: usize) -> RGBColor {
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

/// Lower bound of the time axis, in seconds; smaller values are drawn here.
const LEAST: f64 = 0.001;

/// Waiting times of one policy, in seconds.
#[derive(Clone, Debug)]
pub struct Distribution {
    /// Name of the policy.
    pub name: String,
    /// Values in any order.
    pub values: Vec<f64>,
}

/// Renders distributions as SVG text.
pub(super) fn distribution_svg(title: &str, of: &[Distribution]) -> Result<String, PlotError> {
    let sorted: Vec<_> = of.iter().map(|one| (one.name.as_str(), sorted(&one.values))).collect();
    let all = || sorted.iter().flat_map(|(_, values)| values);
    let (Some(least), Some(most)) =
        (all().copied().min_by(f64::total_cmp), all().copied().max_by(f64::total_cmp))
    else {
        return Err(PlotError::Empty);
    };
    let (begin, end) = (least.log10().floor(), most.log10().ceil().max(least.log10().floor() + 1.0));
    picture(&[title], |_, area| {
        let (chart_area, legend_area) = area.split_horizontally(WIDTH - LEGEND);
        let time: Axis<'_> = (begin..end, "seconds", 11, &|x| seconds(*x));
        let requests: Axis<'_> = (0.0..1.0, "requests", 6, &|y| format!("{:.0} %", y * 100.0));
        let mut chart = axes(&chart_area, time, requests, true)?;
        let mut legend = Legend::new(&legend_area, "policy", "p99")?;
        for (name, values) in sorted.iter().filter(|(_, values)| !values.is_empty()) {
            let ink = colour(name, 0).stroke_width(if *name == "glake" { 3 } else { 2 });
            chart.draw_series(LineSeries::new(steps(values), ink)).map_err(undrawable)?;
            let p99 = values[(values.len() * 99).div_ceil(100).max(1) - 1];
            legend.line(ink, name, &format!("{p99:.2} s"))?;
        }
        Ok(())
    })
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.iter().map(|value| value.max(LEAST)).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Reduces the values to a few hundred points, the most that a picture shows.
#[allow(clippy::cast_precision_loss)] // counts of requests
fn steps(values: &[f64]) -> Vec<(f64, f64)> {
    let every = (values.len() / 600).max(1);
    let places = (0..values.len()).step_by(every).chain([values.len() - 1]);
    places.map(|place| (values[place].log10(), (place + 1) as f64 / values.len() as f64)).collect()
}

fn seconds(log: f64) -> String {
    let value = 10_f64.powf(log);
    if value >= 1.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod distribution_tests {
    use super::*;

    #[test]
    fn draws_a_line_a_policy_and_refuses_nothing_at_all() {
        let one =
            |name: &str, values: &[f64]| Distribution { name: name.to_owned(), values: values.to_vec() };
        let text =
            distribution_svg("requests.csv", &[one("glake", &[0.0, 0.5, 2.0]), one("static", &[])]).unwrap();
        for needle in ["requests.csv", "glake", "2.00 s", "seconds"] {
            assert!(text.contains(needle), "{needle}");
        }
        assert!(!text.contains("static"));
        assert!(matches!(distribution_svg("none", &[one("glake", &[])]), Err(PlotError::Empty)));
    }
}
