//! Standard output: tables for people, or one JSON object a line.

use std::io::{self, Write};

use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use serde::Serialize;

use super::Failure;

/// A line below the headers, and nothing else.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Destination of a command's results.
pub(super) struct Output {
    json: bool,
}

impl Output {
    pub(super) fn new(json: bool) -> Self {
        Output { json }
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
        if self.json { Ok(()) } else { self.line(text) }
    }

    fn line(&mut self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        Ok(out.flush()?)
    }
}

/// A table whose first `names` columns are text and whose others are figures.
pub(super) fn table(names: usize, headers: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |column: usize, text: &str| {
        let side = if column < names { CellAlignment::Left } else { CellAlignment::Right };
        Cell::new(text).set_alignment(side)
    };
    let line = |texts: &mut dyn Iterator<Item = &str>| -> Vec<Cell> {
        texts.enumerate().map(|(column, text)| cell(column, text)).collect()
    };
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(line(&mut headers.iter().copied()));
    for row in rows {
        table.add_row(line(&mut row.iter().map(String::as_str)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 1));
    }
    table.trim_fmt()
}
