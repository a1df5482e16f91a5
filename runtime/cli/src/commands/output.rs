//! Standard output: tables for people, or one JSON object per line; and notes and a progress bar on standard error.
//!
//! Invariant: text of other programs (names, errors, GPUs) is escaped here, on its way to people; JSON objects are exact.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write};

use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use glake_units::printable;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::Failure;

/// A line below the headers, and nothing else.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Destination of a command's results.
pub(super) struct Output {
    json: bool,
    /// Whether text has colours: on a terminal, unless `NO_COLOR` is set or the terminal is dumb.
    colours: bool,
}

/// Emphasis of text for people.
#[derive(Clone, Copy, Debug)]
pub(super) enum Paint {
    /// Success, or memory in a new place.
    Good,
    /// Failure.
    Bad,
    /// Heading or result.
    Strong,
}

impl Output {
    pub(super) fn new(json: bool, colours: bool) -> Self {
        Output { json, colours: colours && io::stdout().is_terminal() }
    }

    /// Returns the text in colour, or unchanged if the output has no colours.
    pub(super) fn paint(&self, paint: Paint, text: &str) -> String {
        let begin = match paint {
            Paint::Good => MARKS[0].0,
            Paint::Bad => MARKS[1].0,
            Paint::Strong => MARKS[2].0,
        };
        if self.colours { format!("{begin}{}{}", shown(text), MARKS[3].0) } else { text.to_owned() }
    }

    /// Returns the text with runs of one character in colour.
    pub(super) fn painted(&self, text: &str, character: char, paint: Paint) -> String {
        let mut painted = String::new();
        for run in text.split_inclusive(|letter| letter != character) {
            let rest = run.trim_start_matches(character);
            let coloured = &run[..run.len() - rest.len()];
            if !coloured.is_empty() {
                painted += &self.paint(paint, coloured);
            }
            painted += rest;
        }
        painted
    }

    /// Whether results are wanted as JSON.
    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// Writes one JSON object on a line.
    pub(super) fn object(&mut self, object: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string(object).map_err(Failure::failed)?;
        self.line(&text)
    }

    /// A line for people; lost where JSON is wanted.
    pub(super) fn text(&mut self, text: &str) -> Result<(), Failure> {
        if self.json { Ok(()) } else { self.line(&coloured(text)) }
    }

    /// Text for programs, which is escaped on a terminal only.
    pub(super) fn exact(&mut self, text: &str) -> Result<(), Failure> {
        if io::stdout().is_terminal() { self.line(&shown(text)) } else { self.line(text) }
    }

    /// Whether text has colours.
    pub(super) fn has_colours(&self) -> bool {
        self.colours
    }

    /// A drawn frame, whose texts were escaped when it was drawn.
    pub(super) fn drawn(&mut self, text: &str) -> Result<(), Failure> {
        self.line(text)
    }

    fn line(&mut self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        Ok(out.flush()?)
    }
}

/// Colours in text on its way to [`Output::text`]: noncharacters, which no text of others brings through, and what a terminal gets for them.
const MARKS: [(char, &str); 4] =
    [('\u{fdd0}', "\x1b[32m"), ('\u{fdd1}', "\x1b[1;31m"), ('\u{fdd2}', "\x1b[1m"), ('\u{fdd3}', "\x1b[0m")];

/// Escapes each line of a text for people.
fn shown(text: &str) -> Cow<'_, str> {
    match text.contains('\n') {
        true => Cow::Owned(text.split('\n').map(printable).collect::<Vec<_>>().join("\n")),
        false => printable(text),
    }
}

/// Escapes a text except for its colours.
fn coloured(text: &str) -> String {
    let mut coloured = String::new();
    for part in text.split_inclusive(|letter| MARKS.iter().any(|(mark, _)| *mark == letter)) {
        let end = part.chars().next_back();
        let mark = MARKS.iter().find(|(mark, _)| Some(*mark) == end);
        coloured += &shown(mark.map_or(part, |(mark, _)| part.strip_suffix(*mark).unwrap_or(part)));
        coloured += mark.map_or("", |(_, code)| code);
    }
    coloured
}

/// Writes a line for people to standard error.
pub(super) fn note(text: impl Display) {
    // Whoever closed standard error does not want to hear it.
    let _ = writeln!(io::stderr(), "glake: {}", shown(&text.to_string()));
}

/// Breaks a text into lines of at most `width` characters.
pub(super) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Returns a table whose first `names` columns are text and whose others are figures. On a terminal that is too narrow for it, headers and
/// rows change places; if that is too wide as well, cells are broken.
pub(super) fn table(names: usize, headers: &[&str], rows: &[Vec<String>]) -> String {
    let is_text = |column: usize| column < names;
    let header: Vec<&str> = headers.to_vec();
    // A cell is one line, and as wide as it is shown.
    let rows: Vec<Vec<Cow<'_, str>>> =
        rows.iter().map(|row| row.iter().map(|cell| cell_of(cell)).collect()).collect();
    let body: Vec<Vec<&str>> = rows.iter().map(|row| row.iter().map(|cell| &**cell).collect()).collect();
    let plain = arranged(&header, &body, &is_text, ContentArrangement::Disabled);
    let Some(width) = Table::new().width().map(usize::from) else { return plain };
    let fits = |text: &str| text.lines().all(|line| line.chars().count() <= width);
    if fits(&plain) {
        return plain;
    }
    let mut turned = (0..headers.len()).map(|at| {
        let figures = body.iter().map(|row| row.get(at).copied().unwrap_or_default());
        std::iter::once(headers[at]).chain(figures).collect::<Vec<&str>>()
    });
    let header = turned.next().unwrap_or_default();
    let is_name = |column: usize| column == 0;
    let turned = arranged(&header, &turned.collect::<Vec<_>>(), &is_name, ContentArrangement::Disabled);
    if fits(&turned) {
        return turned;
    }
    arranged(headers, &body, &is_text, ContentArrangement::Dynamic)
}

/// Returns the text of a cell; one that has colours was escaped before.
fn cell_of(cell: &str) -> Cow<'_, str> {
    if cell.contains(MARKS[3].0) { Cow::Borrowed(cell) } else { printable(cell) }
}

/// Returns a table; `is_text` tells which columns are aligned to the left.
fn arranged(
    headers: &[&str],
    rows: &[Vec<&str>],
    is_text: &dyn Fn(usize) -> bool,
    arrangement: ContentArrangement,
) -> String {
    let line = |texts: &[&str]| -> Vec<Cell> {
        let side = |column| if is_text(column) { CellAlignment::Left } else { CellAlignment::Right };
        texts.iter().enumerate().map(|(column, text)| Cell::new(text).set_alignment(side(column))).collect()
    };
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(arrangement);
    table.set_header(line(headers));
    for row in rows {
        table.add_row(line(row));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 1));
    }
    table.trim_fmt()
}

/// Line on a terminal about what a command waits for; appears with the first text.
#[derive(Debug, Default)]
pub(super) struct Waiting(Option<ProgressBar>);

impl Waiting {
    pub(super) fn say(&mut self, why: &str) {
        let bar = self.0.get_or_insert_with(|| {
            let bar = match io::stderr().is_terminal() {
                true => ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)),
                false => ProgressBar::hidden(),
            };
            if let Ok(style) = ProgressStyle::with_template("waiting {elapsed}: {wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        bar.set_message(printable(why).into_owned());
        bar.tick();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.iter().for_each(ProgressBar::finish_and_clear);
    }
}

/// Progress bar of long work.
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Work of `steps` steps.
    pub(super) fn new(steps: u64) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(10))
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) =
            ProgressStyle::with_template("{msg:28!} {wide_bar:.cyan/dim} {percent:>3} %  {eta} left")
        {
            bar.set_style(style.progress_chars("━━─"));
        }
        Progress { bar }
    }

    /// Sets the message beside the bar.
    pub(super) fn say(&self, what: impl Into<String>) {
        self.bar.set_message(printable(&what.into()).into_owned());
    }

    /// Sets the number of completed steps.
    pub(super) fn reach(&self, step: u64) {
        self.bar.set_position(step);
    }

    /// Takes the bar away, for a line in its place.
    pub(super) fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOREIGN: &str = "chat\u{1b}[2J\n\u{202e}0\u{fdd0}";
    const ESCAPED: &str = r"chat\u{1b}[2J\n\u{202e}0\u{fdd0}";

    #[test]
    fn text_of_others_is_escaped_and_colours_are_ours() {
        let output = Output { json: false, colours: true };
        let painted = output.paint(Paint::Bad, FOREIGN);
        let text = coloured(&format!("{painted} and\nmore"));
        assert_eq!(text, "\x1b[1;31mchat\\u{1b}[2J\n\\u{202e}0\\u{fdd0}\x1b[0m and\nmore");
        let rows = [vec![FOREIGN.to_owned(), "1".to_owned()], vec!["b".to_owned(), "22".to_owned()]];
        let table = table(1, &["worker", "pid"], &rows);
        assert_eq!(table.lines().count(), 4, "{table}");
        assert!(table.contains(ESCAPED) && !table.contains('\u{1b}'), "{table}");
    }

    /// Each line for people goes through this file.
    #[test]
    fn no_command_writes_to_a_terminal_itself() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/commands");
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let (name, text) =
                (entry.file_name().into_string().unwrap(), std::fs::read_to_string(entry.path()).unwrap());
            let writes = ["writeln!(io::stderr()", "print!(", "println!(", "io::stdout()"];
            let found = writes.iter().find(|writes| text.contains(**writes));
            assert!(name == "output.rs" || found.is_none(), "{name}: {found:?}");
        }
    }
}
