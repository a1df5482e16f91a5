//! Paths of each GPU as table rows and as JSON.

use glake_device::DeviceId;
use glake_transfer::paths::{Direction, PathGraph, PathRate, Way};
use serde_json::{Value, json};

use super::{Rows, rate};

/// The paths, by target and direction, its own link first: GB/s alone and microseconds besides.
pub fn paths(graph: &PathGraph) -> Rows {
    let mut rows = Vec::new();
    for (target, direction) in targets(graph) {
        for (number, path) in graph.rates(target, direction).enumerate() {
            let first = |text: String| if number == 0 { text } else { String::new() };
            rows.push(vec![
                first(target.to_string()),
                first(way_of(direction).to_owned()),
                over(&path),
                format!("{:.1}", path.rate.0),
                format!("{:.1}", path.latency.0),
                first(format!("{:.1}", graph.together(target, direction).0)),
            ]);
        }
    }
    let headers = ["target", "direction", "over", "GB/s", "besides, us", "together GB/s"];
    Rows { names: 3, headers: headers.map(str::to_owned).into(), rows }
}

/// The same as a list of objects.
pub(super) fn paths_json(graph: &PathGraph) -> Value {
    let of_target = |(target, direction): (DeviceId, Direction)| {
        let path = move |path: PathRate| {
            json!({
                "relay": path.relay.0, "way": path.way, "gbps": path.rate.0, "latency_us": path.latency.0,
            })
        };
        json!({
            "target": target.0,
            "direction": direction,
            "together_gbps": graph.together(target, direction).0,
            "paths": graph.rates(target, direction).map(path).collect::<Vec<Value>>(),
        })
    };
    targets(graph).map(of_target).collect()
}

/// Returns the combined rates of all paths for a GPU's line in the picture.
pub(super) fn together(graph: &PathGraph, device: DeviceId) -> Option<String> {
    let all = |direction| graph.together(device, direction).0;
    let (to, from) = (all(Direction::ToGpu), all(Direction::FromGpu));
    (to > 0.0 && from > 0.0).then(|| format!("{} and {} over all links", rate(to), rate(from)))
}

fn targets(graph: &PathGraph) -> impl Iterator<Item = (DeviceId, Direction)> {
    graph.paths().links.iter().map(|link| (link.device, link.direction))
}

fn over(path: &PathRate) -> String {
    match path.way {
        Way::Direct => "its own link".to_owned(),
        Way::ZeroStaging => format!("{}, pool memory", path.relay),
        Way::Staged => format!("{}, other memory", path.relay),
    }
}

fn way_of(direction: Direction) -> &'static str {
    match direction {
        Direction::ToGpu => "to it",
        Direction::FromGpu => "from it",
    }
}

#[cfg(test)]
mod tests {
    use glake_device::topology::Topology;
    use glake_sim::load;
    use glake_transfer::paths::GpuLinks;

    use super::*;

    fn assumed(name: &str) -> PathGraph {
        PathGraph::conservative(&GpuLinks::of(&Topology::from(&load(name).unwrap())))
    }

    #[test]
    fn a_target_s_own_link_comes_first() {
        let rows = paths(&assumed("h200x4"));
        assert!(rows.rows.iter().all(|row| row.len() == rows.headers.len()));
        assert_eq!(rows.rows[0][..3], ["GPU 0", "to it", "its own link"]);
        assert_eq!(rows.rows[1][..2], ["", ""]);
        assert!(rows.rows[1][2].starts_with("GPU 1, "));
        assert_eq!(rows.rows.iter().filter(|row| row[2] == "its own link").count(), 8);
    }

    #[test]
    fn figures_as_json_and_in_the_picture() {
        let graph = assumed("h200x4");
        let value = paths_json(&graph);
        assert_eq!(value.as_array().map(Vec::len), Some(8));
        assert_eq!(value[0]["paths"][0]["way"], "direct");
        assert!(together(&graph, DeviceId(0)).is_some_and(|text| text.ends_with("over all links")));
        assert_eq!(together(&PathGraph::empty(), DeviceId(0)), None);
    }
}
