//! Files that are written from the code are what the code says. `UPDATE=1 cargo test -p glake-runtime --test generated` writes them.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use glake_runtime::config::{Config, Environment, Knob};

const DEFAULTS_HEAD: &str = "\
# Every key with its default, what it does, and in brackets what its value may be. Written from the code; docs/TUNING.md
# says more. Order of precedence: flags, environment, this kind of file (GLAKE_CONFIG or --config), preset, defaults.
# Sizes are bytes or text with a unit of 1024s: \"512KiB\", \"16MiB\", \"32GiB\".
# Keys that are commented out are absent by default.
";

#[test]
fn the_default_file_is_written_from_the_knobs() {
    let (config, mut text, mut of) = (Config::default(), DEFAULTS_HEAD.to_owned(), "");
    for knob in Knob::all() {
        let (table, name) = knob.name();
        if table != of {
            write!(text, "\n[{table}]\n").unwrap();
            of = table;
        }
        let absent =
            knob.absent.map_or(String::new(), |(means, _)| format!("; absent: {}", means.replace('`', "")));
        let about = summary(knob).join(" ").replace('`', "");
        let allowed = if knob.allowed == "true or false" { "" } else { &format!(" [{}]", allowed(knob)) };
        wrap(&mut text, &format!("{about}{allowed}{absent}"));
        match (knob.value(&config), knob.absent) {
            (Some(value), _) => writeln!(text, "{name} = {value}").unwrap(),
            (None, Some((_, shown))) => writeln!(text, "#{name} = {shown}").unwrap(),
            (None, None) => panic!("{} has no default and no meaning without a value", knob.key),
        }
    }
    compare("configs/default.toml", |_| text);
}

#[test]
fn the_reference_of_knobs_is_written_from_them() {
    let (config, mut text, mut of) = (Config::default(), String::new(), "");
    for knob in Knob::all() {
        let (table, name) = knob.name();
        if table != of {
            write!(text, "\n| `[{table}]` | default | allowed | |\n|---|---|---|---|\n").unwrap();
            of = table;
        }
        let variables: Vec<_> = Environment::names(knob.key).collect();
        let variables =
            if variables.is_empty() { String::new() } else { format!(" ({})", variables.join(", ")) };
        let default = match (knob.value(&config), knob.absent) {
            (Some(value), _) => format!("`{value}`"),
            (None, absent) => absent.map_or("", |(means, _)| means).to_owned(),
        };
        let about: Vec<_> =
            knob.about.iter().map(|line| line.trim()).filter(|line| !line.is_empty()).collect();
        writeln!(text, "| `{name}`{variables} | {default} | {} | {} |", allowed(knob), about.join(" "))
            .unwrap();
    }
    within("docs/TUNING.md", &text);
}

/// What may be written, but for how sizes are, which both files say once.
fn allowed(knob: &Knob) -> &'static str {
    knob.allowed.split(": bytes").next().unwrap_or_default()
}

/// The lines before the first empty one.
fn summary(knob: &Knob) -> Vec<&'static str> {
    knob.about.iter().map(|line| line.trim()).take_while(|line| !line.is_empty()).collect()
}

/// A comment in lines of at most 120 characters.
fn wrap(text: &mut String, comment: &str) {
    let mut line = String::from("#");
    for word in comment.split(' ') {
        if line.len() + 1 + word.len() > 120 {
            writeln!(text, "{line}").unwrap();
            line = String::from("#");
        }
        write!(line, " {word}").unwrap();
    }
    writeln!(text, "{line}").unwrap();
}

/// Holds the part of a file between two marks against `text`.
fn within(file: &str, text: &str) {
    const MARKS: [&str; 2] = ["<!-- written from the code -->\n", "<!-- until here -->\n"];
    compare(file, |there| {
        let (before, rest) = there.split_once(MARKS[0]).expect("a first mark");
        let (_, after) = rest.split_once(MARKS[1]).expect("a last mark");
        [before, MARKS[0], text, "\n", MARKS[1], after].concat()
    });
}

/// Holds a file against what it should be, given what is there; `UPDATE` writes it.
fn compare(file: &str, written: impl FnOnce(&str) -> String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let there = fs::read_to_string(&path).unwrap_or_default();
    let written = written(&there);
    if env::var_os("UPDATE").is_some() {
        return fs::write(&path, written).unwrap();
    }
    assert!(there == written, "{file} is not what the code says: run make generated");
}
