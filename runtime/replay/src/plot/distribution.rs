//! Cumulative distributions: number of requests by maximum waiting time, over a logarithmic axis of seconds.

use plotters::prelude::{ChartBuilder, IntoDrawingArea, LineSeries, PathElement, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color as _, WHITE};

use super::PlotError;
use super::draw::{LEGEND, MARGIN, PANEL, TITLE, WIDTH, bold, font, i32_of, undrawable};
use super::palette::{GRID, INK, MUTED, colour};

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

/// Renders the picture as SVG text.
pub(super) fn svg(title: &str, of: &[Distribution]) -> Result<String, PlotError> {
    let sorted: Vec<_> = of.iter().map(|one| (one.name.as_str(), sorted(&one.values))).collect();
    let all = || sorted.iter().flat_map(|(_, values)| values);
    let (Some(least), Some(most)) =
        (all().copied().min_by(f64::total_cmp), all().copied().max_by(f64::total_cmp))
    else {
        return Err(PlotError::Empty);
    };
    let (begin, end) = (least.log10().floor(), most.log10().ceil().max(least.log10().floor() + 1.0));
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, PANEL)).into_drawing_area();
        root.fill(&WHITE).map_err(undrawable)?;
        let (chart_area, legend) = root.split_horizontally(WIDTH - LEGEND);
        let mut chart = ChartBuilder::on(&chart_area)
            .margin(MARGIN)
            .margin_top(TITLE)
            .margin_right(0)
            .x_label_area_size(46)
            .y_label_area_size(62)
            .build_cartesian_2d(begin..end, 0.0..1.0)
            .map_err(undrawable)?;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .max_light_lines(0)
            .axis_style(MUTED)
            .y_labels(6)
            .x_label_formatter(&|x| seconds(*x))
            .y_label_formatter(&|y| format!("{:.0} %", y * 100.0))
            .x_desc("seconds")
            .y_desc("requests")
            .label_style(font(14, MUTED))
            .axis_desc_style(font(15, INK))
            .draw()
            .map_err(undrawable)?;
        let mut y = i32_of(TITLE) + 8;
        let left = |size, ink| font(size, ink).pos(Pos::new(HPos::Left, VPos::Center));
        let right = |size, ink| font(size, ink).pos(Pos::new(HPos::Right, VPos::Center));
        legend.draw_text("policy", &left(13, MUTED), (20, y)).map_err(undrawable)?;
        legend.draw_text("p99", &right(13, MUTED), (i32_of(LEGEND - MARGIN), y)).map_err(undrawable)?;
        for (name, values) in sorted.iter().filter(|(_, values)| !values.is_empty()) {
            y += 28;
            let ink = colour(name, 0).stroke_width(if *name == "glake" { 3 } else { 2 });
            chart.draw_series(LineSeries::new(steps(values), ink)).map_err(undrawable)?;
            legend.draw(&PathElement::new(vec![(20, y), (44, y)], ink)).map_err(undrawable)?;
            legend.draw_text(name, &left(15, INK), (54, y)).map_err(undrawable)?;
            let p99 = values[(values.len() * 99).div_ceil(100).max(1) - 1];
            let place = (i32_of(LEGEND - MARGIN), y);
            legend.draw_text(&format!("{p99:.2} s"), &right(15, INK), place).map_err(undrawable)?;
        }
        root.draw_text(title, &bold(22, INK), (i32_of(MARGIN), 16)).map_err(undrawable)?;
        root.present().map_err(undrawable)?;
    }
    Ok(text)
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
mod tests {
    use super::*;

    #[test]
    fn draws_a_line_a_policy_and_refuses_nothing_at_all() {
        let one =
            |name: &str, values: &[f64]| Distribution { name: name.to_owned(), values: values.to_vec() };
        let text = svg("requests.csv", &[one("glake", &[0.0, 0.5, 2.0]), one("static", &[])]).unwrap();
        for needle in ["requests.csv", "glake", "2.00 s", "seconds"] {
            assert!(text.contains(needle), "{needle}");
        }
        assert!(!text.contains("static"));
        assert!(matches!(svg("none", &[one("glake", &[])]), Err(PlotError::Empty)));
    }
}
