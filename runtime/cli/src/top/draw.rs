//! The arrangement of a scene on a screen of any size. Pure: a scene and the state of the view in, cells out.
//!
//! ```text
//! glake top  source                            4 workers, 1 waits
//! notice, if there is one
//! GPU memory                                          last minute
//! 0 │chat 60 GiB     ░░│others ╱╱│ free ·····│ 80 of 141 GiB ▁▃▅▇
//! worker         state        on GPU   in RAM  wake-up  idle for
//! ...
//! Waiting for memory, the first in line first
//! Last decisions
//! keys, a question or an answer
//! ```

use std::collections::{BTreeMap, VecDeque};

use glake_units::Bytes;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::Span;

use super::paint::{Fill, Look, Marks};
use super::scene::{Event, Gpu, Owner, Row, Scene, Waiter, size, span};

/// Seconds of history beside a GPU's bar.
pub const HISTORY_S: usize = 60;

/// State of the view: everything that is drawn and not part of the scene.
#[derive(Clone, Debug)]
pub struct View {
    /// Abilities of the terminal.
    pub look: Look,
    /// Marks of the rows.
    pub marks: Marks,
    /// Shares of each GPU's memory that were in use, by its name, one a second, the oldest first.
    pub history: BTreeMap<String, VecDeque<f64>>,
    /// Key of the chosen row. None: none is chosen.
    pub chosen: Option<String>,
    /// What is wrong with the source, if anything is.
    pub notice: Option<String>,
    /// Last line: keys, a question or an answer.
    pub footer: String,
    /// Whether the last line must be seen.
    pub is_urgent: bool,
}

impl View {
    /// Returns a view in which nothing is chosen.
    pub fn new(look: Look) -> View {
        View {
            look,
            marks: Marks::default(),
            history: BTreeMap::new(),
            chosen: None,
            notice: None,
            footer: String::new(),
            is_urgent: false,
        }
    }
}

const STRONG: Style = Style::new().add_modifier(Modifier::BOLD);
const CHOSEN: Style = Style::new().add_modifier(Modifier::REVERSED);
const PLAIN: Style = Style::new();

/// Lines of a screen from top to bottom.
struct Lines<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
    next: u16,
    end: u16,
}

impl Lines<'_> {
    fn left(&self) -> usize {
        usize::from(self.end.saturating_sub(self.next))
    }

    fn width(&self) -> usize {
        usize::from(self.area.width)
    }

    /// Writes a line of parts with their columns, and goes on to the next line.
    fn line(&mut self, parts: &[(usize, usize, &str, Style)]) {
        if self.left() == 0 {
            return;
        }
        for (column, width, text, style) in parts {
            put(self.buffer, self.area, *column, self.next, *width, text, *style);
        }
        self.next += 1;
    }

    fn text(&mut self, text: &str, style: Style) {
        self.line(&[(0, self.width(), text, style)]);
    }

    fn blank(&mut self) {
        self.line(&[]);
    }
}

/// Writes at most `width` columns of a text, with `…` for the rest. `y` counts from the top of the buffer, `column` from the left of the
/// area.
fn put(buffer: &mut Buffer, area: Rect, column: usize, y: u16, width: usize, text: &str, style: Style) {
    let width = width.min(usize::from(area.width).saturating_sub(column));
    let Ok(offset) = u16::try_from(column) else { return };
    if width == 0 || y < area.y || y >= area.bottom() {
        return;
    }
    let x = area.x.saturating_add(offset);
    let (end, _) = buffer.set_stringn(x, y, text, width, style);
    let is_cut = Span::raw(text).width() > width;
    if is_cut && end > x {
        buffer.set_stringn(end - 1, y, "…", 1, style);
    }
}

/// Draws a scene.
pub fn draw(scene: &Scene, view: &View, area: Rect, buffer: &mut Buffer) {
    let area = area.intersection(buffer.area);
    if area.is_empty() {
        return;
    }
    let has_frame = area.height >= 8;
    let end = if has_frame { area.bottom() - 1 } else { area.bottom() };
    let mut lines = Lines { buffer, area, next: area.y, end };
    if has_frame {
        header(&mut lines, scene);
    }
    if let Some(notice) = &view.notice {
        lines.text(notice, if view.look.has_colours() { CHOSEN } else { STRONG });
    }
    gpus(&mut lines, scene, view);
    // The lists below take what they need, the rows the rest; the rows get a third at least.
    let room = lines.left();
    let (queue, events) = lists(scene, room, usize::from(area.width));
    let rows = room.saturating_sub(queue + events).min(scene.rows.len().max(1) + 2);
    self::rows(&mut lines, scene, view, rows);
    self::queue(&mut lines, scene, queue);
    self::events(&mut lines, scene, events);
    if has_frame {
        let style = if view.is_urgent { STRONG } else { PLAIN };
        put(buffer, area, 0, area.bottom() - 1, usize::from(area.width), &view.footer, style);
    }
    if view.look == Look::Ascii {
        let cells = buffer.content.iter_mut().filter(|cell| !cell.symbol().is_ascii());
        cells.for_each(|cell| {
            cell.set_symbol(if cell.symbol() == "…" { "~" } else { "?" });
        });
    }
}

fn header(lines: &mut Lines<'_>, scene: &Scene) {
    let waiting = scene.queue.iter().filter(|waiter| !waiter.is_served).count();
    let what = if scene.is_agent { "worker" } else { "process" };
    let many = match scene.rows.len() {
        1 => format!("1 {what}"),
        many if what == "process" => format!("{many} processes"),
        many => format!("{many} {what}s"),
    };
    let summary = if scene.is_agent { format!("{many}, {waiting} waiting") } else { many };
    let width = lines.width();
    let at = width.saturating_sub(summary.chars().count());
    let room = at.saturating_sub(12);
    lines.line(&[
        (0, 10, "glake top", STRONG),
        (11, room, &scene.source, PLAIN),
        (at, width, &summary, PLAIN),
    ]);
}

/// Short names of rows, by their keys.
type Labels<'a> = BTreeMap<&'a str, &'a str>;

/// Columns of a GPU's line: name, bar, numbers, history.
struct GpuColumns {
    name: usize,
    bar: usize,
    numbers: usize,
    history: usize,
}

impl GpuColumns {
    fn of(width: usize, longest: usize) -> GpuColumns {
        let name = if width < 40 { longest.min(7) } else { longest.min(16) };
        let numbers = if width >= 60 { 17 } else { 0 };
        let history = match width {
            0..=59 => 0,
            60..=99 => 12,
            100..=149 => 20,
            _ => HISTORY_S / 2,
        };
        let gaps = usize::from(numbers > 0) + usize::from(history > 0);
        let bar = width.saturating_sub(name + 3 + numbers + history + gaps);
        GpuColumns { name, bar, numbers, history }
    }
}

fn gpus(lines: &mut Lines<'_>, scene: &Scene, view: &View) {
    let height = usize::from(lines.area.height);
    let most = if height < 8 { height.div_ceil(2) } else { (height / 3).min(16) };
    let shown = scene.gpus.len().min(most);
    let longest = scene.gpus.iter().map(|gpu| gpu.name.chars().count()).max().unwrap_or(0);
    let columns = GpuColumns::of(lines.width(), longest);
    if lines.area.height >= 8 {
        let title = match scene.gpus.len() {
            0 => "GPU memory: no GPU is known".to_owned(),
            all if all > shown => format!("GPU memory ({shown} of {all} GPUs)"),
            _ => "GPU memory".to_owned(),
        };
        let at = lines.width().saturating_sub(columns.history);
        lines.line(&[(0, at, &title, STRONG), (at, columns.history, "last minute", PLAIN)]);
    }
    let labels: Labels<'_> = scene.rows.iter().map(|row| (row.key.as_str(), row.label.as_str())).collect();
    for gpu in &scene.gpus[..shown] {
        gpu_line(lines, gpu, view, &labels, &columns);
    }
    if lines.area.height >= 8 {
        lines.blank();
    }
}

fn gpu_line(lines: &mut Lines<'_>, gpu: &Gpu, view: &View, labels: &Labels<'_>, columns: &GpuColumns) {
    if lines.left() == 0 {
        return;
    }
    let (area, y) = (lines.area, lines.next);
    let edge = if view.look == Look::Ascii { "|" } else { "│" };
    put(lines.buffer, area, 0, y, columns.name, &gpu.name, PLAIN);
    let start = columns.name + 1;
    put(lines.buffer, area, start, y, 1, edge, PLAIN);
    bar(lines.buffer, area, (start + 1, y), columns.bar, gpu, view, labels);
    put(lines.buffer, area, start + 1 + columns.bar, y, 1, edge, PLAIN);
    let numbers = used_of(gpu.used, gpu.total);
    let at = start + 2 + columns.bar + 1;
    let pad = columns.numbers.saturating_sub(numbers.chars().count());
    put(lines.buffer, area, at + pad, y, columns.numbers, &numbers, PLAIN);
    if columns.history > 0 {
        let at = lines.width().saturating_sub(columns.history);
        let shares = view.history.get(&gpu.name);
        let graph = history(shares, columns.history, view.look);
        put(lines.buffer, area, at, y, columns.history, &graph, PLAIN);
    }
    lines.next += 1;
}

/// Returns "used of total" in the unit of the total.
fn used_of(used: Bytes, total: Bytes) -> String {
    let whole = size(total);
    if used.is_zero() {
        return format!("0 of {whole}");
    }
    match whole.split_once(' ') {
        Some((number, "GiB")) => {
            let used = used.as_gib();
            if number.contains('.') || used < 9.95 {
                format!("{used:.1} of {whole}")
            } else {
                format!("{used:.0} of {whole}")
            }
        }
        _ => format!("{} of {whole}", size(used)),
    }
}

/// Draws the last minute, the present at the right; seconds that fall into one column are their maximum.
fn history(shares: Option<&VecDeque<f64>>, width: usize, look: Look) -> String {
    let shares: Vec<f64> = shares.map(|shares| shares.iter().copied().collect()).unwrap_or_default();
    let each = HISTORY_S.div_ceil(width.max(1)).max(1);
    let mut graph: Vec<&str> = shares
        .rchunks(each)
        .take(width)
        .map(|part| look.step(part.iter().copied().fold(0.0, f64::max)))
        .collect();
    graph.resize(width, " ");
    graph.into_iter().rev().collect()
}

/// Draws a GPU's memory: its parts in their order, then free memory.
fn bar(
    buffer: &mut Buffer,
    area: Rect,
    (column, y): (usize, u16),
    width: usize,
    gpu: &Gpu,
    view: &View,
    labels: &Labels<'_>,
) {
    let sum: Bytes = gpu.parts.iter().map(|part| part.bytes).sum();
    let whole = gpu.total.max(sum);
    let free = whole.saturating_sub(sum.max(gpu.used));
    let unknown = whole.saturating_sub(free).saturating_sub(sum);
    let mut before = Bytes::ZERO;
    let mut segment = |bytes: Bytes, fill: Fill, name: &str, letter: Option<char>| {
        let begin = column_of(before, whole, width);
        before = before.saturating_add(bytes);
        let end = column_of(before, whole, width);
        let room = end.saturating_sub(begin);
        if room == 0 {
            return;
        }
        put(buffer, area, column + begin, y, room, &fill.symbol.repeat(room), fill.style);
        let long = format!("{name} {}", size(bytes));
        let text = [long.as_str(), name].into_iter().find(|text| text.chars().count() < room);
        let letter = letter.map(String::from).unwrap_or_default();
        let text = text.unwrap_or(if room > 1 || letter.is_empty() { "" } else { &letter });
        let text = if text.is_empty() && room > 1 { letter.as_str() } else { text };
        let gap = if text.chars().count() + 1 < room && !text.is_empty() { " " } else { "" };
        put(buffer, area, column + begin, y, room, &format!("{text}{gap}"), fill.text);
    };
    for part in &gpu.parts {
        match &part.owner {
            Owner::Row(key) => {
                let mark = view.marks.of(key);
                let label = labels.get(key.as_str()).copied().unwrap_or_default();
                segment(part.bytes, view.look.owner(mark), label, Some(Marks::letter(mark)));
            }
            Owner::Waste(key) => segment(part.bytes, view.look.waste(view.marks.of(key)), "unused", None),
            Owner::Others => segment(part.bytes, view.look.others(), "others", None),
            Owner::Driver => segment(part.bytes, view.look.others(), "driver", None),
        }
    }
    segment(unknown, view.look.others(), "others", None);
    let kept = gpu.kept.min(free);
    segment(free.saturating_sub(kept), view.look.free(), "free", None);
    segment(kept, view.look.kept(), "kept free", None);
}

/// Returns the column at which memory begins that has `before` before it.
fn column_of(before: Bytes, whole: Bytes, width: usize) -> usize {
    let share = if whole.is_zero() { 0.0 } else { before.fraction_of(whole) };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let column = (share * width as f64).round() as usize;
    column.min(width)
}

/// Returns the lines of the queue and of the events; the rows have the rest. Where room is short, the queue comes first.
fn lists(scene: &Scene, room: usize, width: usize) -> (usize, usize) {
    if !scene.is_agent {
        return (if room >= 8 { 3 } else { 0 }, 0);
    }
    // A title and a blank line each.
    let rows = (scene.rows.len().max(1) + 2).min(room * 2 / 5);
    let queue =
        2 + scene.queue.iter().map(|waiter| 1 + reasons(waiter, width, MOST_REASONS).len()).sum::<usize>();
    let lines = scene.events.iter().take(MOST_EVENTS).map(|event| words_of(event, width).len());
    let events = if scene.events.is_empty() { 0 } else { 1 + lines.sum::<usize>() };
    let queue = queue.min(room.saturating_sub(rows + events.min(3)));
    let events = events.min(room.saturating_sub(rows + queue));
    (queue, if events < 2 { 0 } else { events })
}

/// Number of decisions that are shown at most.
const MOST_EVENTS: usize = 12;
/// Number of lines of the reasons of one wait at most.
const MOST_REASONS: usize = 3;
/// Columns before the reasons of a wait, and before the words of a decision.
const REASONS: usize = 5;
const WORDS: usize = 12;

/// Returns the lines of the reasons for which a request waits.
fn reasons(waiter: &Waiter, width: usize, most: usize) -> Vec<String> {
    match waiter.is_served {
        true => wrapped(&format!("has all of it: {}", waiter.why), width.saturating_sub(REASONS), most),
        false => wrapped(&waiter.why, width.saturating_sub(REASONS), most),
    }
}

/// Returns the lines of a decision.
fn words_of(event: &Event, width: usize) -> Vec<String> {
    wrapped(&event.text, width.saturating_sub(WORDS), 2)
}

/// Breaks a text into lines at blanks; what does not fit into `most` lines stays in the last one, which is cut when it is drawn.
fn wrapped(text: &str, width: usize, most: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let count = lines.len();
        let Some(line) = lines.last_mut() else { break };
        let fits = Span::raw(line.as_str()).width() + 1 + Span::raw(word).width() <= width;
        if line.is_empty() || fits || count == most {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// Column of the table: its title, its width, its text, and whether it is a figure.
struct Column {
    title: &'static str,
    width: usize,
    is_figure: bool,
    text: fn(&Row) -> String,
}

/// Returns the columns of the table that fit: the name and the state take what the figures leave.
fn table(scene: &Scene, width: usize) -> Vec<Column> {
    let some = |of: fn(&Row) -> bool| scene.rows.iter().any(of);
    let figure = |title, text| Column { title, width: 9, is_figure: true, text };
    let mut figures = vec![figure("on GPU", |row| size(row.on_gpu))];
    if some(|row| row.waste.is_some()) && (!scene.is_agent || width >= 100) {
        figures.push(figure("unused", |row| row.waste.map_or(String::new(), size)));
    }
    figures.push(figure("in RAM", |row| size(row.in_host)));
    if some(|row| !row.in_files.is_zero()) || width >= 120 {
        figures.push(figure("in files", |row| size(row.in_files)));
    }
    if some(|row| !row.in_peers.is_zero()) {
        figures.push(figure("on others", |row| size(row.in_peers)));
    }
    if scene.is_agent {
        figures.push(figure("wake-up", |row| row.wake_s.map_or("-".to_owned(), span)));
        figures.push(figure("idle for", |row| row.idle_s.map_or("-".to_owned(), span)));
    } else {
        figures.push(figure("quiet", |row| row.idle_s.map_or("-".to_owned(), span)));
    }
    if width >= 100 {
        figures.push(Column { title: "GPUs", width: 18, is_figure: true, text: |row| row.gpus.clone() });
    }
    if !scene.is_agent || width >= 100 {
        let pid = |row: &Row| if row.pid == 0 { "-".to_owned() } else { row.pid.to_string() };
        figures.push(figure("pid", pid));
    }
    // The name and the state first, then as many figures as fit.
    let least = if scene.is_agent { 30 } else { 22 };
    while figures.iter().map(|figure| figure.width).sum::<usize>() > width.saturating_sub(3 + least) {
        figures.pop();
    }
    let rest = width.saturating_sub(3 + figures.iter().map(|figure| figure.width).sum::<usize>());
    let longest = scene.rows.iter().map(|row| Span::raw(&row.name).width()).max().unwrap_or(0);
    let state = match (rest, scene.is_agent) {
        (0..=19, _) => 0,
        (_, true) => (rest - (longest + 1).clamp(8, rest / 2)).min(40),
        (_, false) => 14.min(rest / 2),
    };
    let title = if scene.is_agent { "worker" } else { "process" };
    let mut columns = vec![Column {
        title,
        width: (rest - state).min((longest + 1).max(12)),
        is_figure: false,
        text: |row| row.name.clone(),
    }];
    if state > 0 {
        columns.push(Column {
            title: "state",
            width: state,
            is_figure: false,
            text: |row| row.state.clone(),
        });
    }
    columns.extend(figures);
    columns
}

fn rows(lines: &mut Lines<'_>, scene: &Scene, view: &View, height: usize) {
    if height == 0 {
        return;
    }
    let columns = table(scene, lines.width());
    let end = lines.left() - height;
    let place = |columns: &[Column], texts: &[String], style: Style| -> Vec<(usize, usize, String, Style)> {
        let mut at = 3;
        let mut places = Vec::new();
        for (column, text) in columns.iter().zip(texts) {
            // A blank column stays between two columns.
            let width = column.width.saturating_sub(1);
            let pad = if column.is_figure { width.saturating_sub(text.chars().count()) + 1 } else { 0 };
            places.push((
                at + pad,
                (width + usize::from(column.is_figure)).saturating_sub(pad),
                text.clone(),
                style,
            ));
            at += column.width;
        }
        places
    };
    if lines.area.height >= 8 {
        let titles: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
        write(lines, &place(&columns, &titles, STRONG));
    }
    let room = lines.left().saturating_sub(end);
    let chosen = view.chosen.as_ref().and_then(|key| scene.rows.iter().position(|row| row.key == *key));
    let hidden = scene.rows.len() > room;
    let shown = if hidden { room.saturating_sub(1) } else { room };
    let first = chosen.map_or(0, |chosen| (chosen + 1).saturating_sub(shown));
    for (at, row) in scene.rows.iter().enumerate().skip(first).take(shown) {
        let texts: Vec<String> = columns.iter().map(|column| (column.text)(row)).collect();
        let style = if chosen == Some(at) { CHOSEN } else { PLAIN };
        let mark = view.marks.of(&row.key);
        let fill = view.look.owner(mark);
        let y = lines.next;
        if chosen == Some(at) {
            lines.buffer.set_style(Rect { y, height: 1, ..lines.area }, CHOSEN);
        }
        if !row.on_gpu.is_zero() {
            let symbol = if fill.symbol == " " { "█" } else { fill.symbol };
            let style = match fill.style.bg {
                Some(colour) => PLAIN.fg(colour),
                None => fill.style,
            };
            put(lines.buffer, lines.area, 0, y, 1, symbol, style);
            put(lines.buffer, lines.area, 1, y, 1, &Marks::letter(mark).to_string(), PLAIN);
        }
        write(lines, &place(&columns, &texts, style));
    }
    if hidden && room > 0 {
        let more = scene.rows.len() - shown.min(scene.rows.len());
        lines.text(&format!("   and {more} more (arrow keys)"), PLAIN);
    }
    if scene.rows.is_empty() && lines.left() > end {
        let none = match scene.is_agent {
            true => "   no worker has joined yet",
            false => "   no process of this user has a GLake pool",
        };
        lines.text(none, PLAIN);
    }
    while lines.left() > end {
        lines.blank();
    }
}

fn write(lines: &mut Lines<'_>, places: &[(usize, usize, String, Style)]) {
    let parts: Vec<(usize, usize, &str, Style)> =
        places.iter().map(|(at, width, text, style)| (*at, *width, text.as_str(), *style)).collect();
    lines.line(&parts);
}

fn queue(lines: &mut Lines<'_>, scene: &Scene, height: usize) {
    if height < 2 {
        return;
    }
    if !scene.is_agent {
        lines.text("Nobody waits: without an agent, processes do not lend each other GPU memory.", STRONG);
        lines.text("A process that needs more than is free fails or makes do. An agent: glake serve", PLAIN);
        return;
    }
    if scene.queue.is_empty() {
        lines.text("Nobody waits for memory", STRONG);
        lines.blank();
        return;
    }
    lines.text("Waiting for memory, in the order of service", STRONG);
    // The blank line below stays, and a line for those that do not fit.
    let (mut room, width) = (height - 2, lines.width());
    // All requests with shorter reasons rather than some of them with all.
    let all = |most: &usize| {
        scene.queue.iter().map(|waiter| 1 + reasons(waiter, width, *most).len()).sum::<usize>() <= room
    };
    let most = (1..=MOST_REASONS).rev().find(all).unwrap_or(1);
    for (at, waiter) in scene.queue.iter().enumerate() {
        let why = reasons(waiter, width, most);
        let is_last = at + 1 == scene.queue.len();
        if room < 1 + usize::from(!is_last) && at > 0 {
            lines.text(&format!("   and {} more", scene.queue.len() - at), PLAIN);
            break;
        }
        let number = format!("{:>2}", at + 1);
        let name = waiter.name.chars().take(24).collect::<String>();
        let after = 3 + Span::raw(&name).width() + 1;
        lines.line(&[(0, 2, &number, PLAIN), (3, width, &name, STRONG), (after, width, &waiter.what, PLAIN)]);
        let shown = why.len().min(room.saturating_sub(1 + usize::from(!is_last)));
        for (number, line) in why.iter().take(shown).enumerate() {
            let rest = why[number..].join(" ");
            let line = if number + 1 == shown { &rest } else { line };
            lines.line(&[(REASONS, width, line, PLAIN)]);
        }
        room = room.saturating_sub(1 + shown);
    }
    lines.blank();
}

fn events(lines: &mut Lines<'_>, scene: &Scene, height: usize) {
    if height < 2 {
        return;
    }
    lines.text("Last decisions", STRONG);
    let (mut room, width) = (height - 1, lines.width());
    for event in scene.events.iter().take(MOST_EVENTS) {
        let words = words_of(event, width);
        let shown = words.len().min(room);
        let ago = format!("{:>6} ago", span(event.ago_s));
        for number in 0..shown {
            let line = if number + 1 == shown { words[number..].join(" ") } else { words[number].clone() };
            let ago = if number == 0 { ago.as_str() } else { "" };
            lines.line(&[(0, 10, ago, PLAIN), (WORDS, width, &line, PLAIN)]);
        }
        room -= shown;
    }
}
