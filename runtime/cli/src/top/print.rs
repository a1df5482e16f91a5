//! A frame as text: with the escape sequences of its colours, or without any.

use std::fmt::Write as _;

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};

/// Returns the lines of a buffer, without the blanks at their ends and without empty lines at the end.
pub fn text(buffer: &Buffer, has_styles: bool) -> String {
    let area = buffer.area;
    let mut text = String::new();
    for y in area.top()..area.bottom() {
        let (mut line, mut style) = (String::new(), Style::reset());
        let mut blanks = 0;
        for x in area.left()..area.right() {
            let cell = &buffer[(x, y)];
            let is_blank = cell.symbol() == " " && (!has_styles || is_plain(cell.style()));
            if is_blank {
                blanks += 1;
                continue;
            }
            if has_styles && blanks > 0 && !is_plain(style) {
                line += "\x1b[0m";
                style = Style::reset();
            }
            (0..std::mem::take(&mut blanks)).for_each(|_| line.push(' '));
            if has_styles && cell.style() != style {
                style = cell.style();
                line += &sequence(style);
            }
            line += cell.symbol();
        }
        if has_styles && !is_plain(style) {
            line += "\x1b[0m";
        }
        let _ = writeln!(text, "{line}");
    }
    text.truncate(text.trim_end_matches('\n').len());
    text
}

/// Returns whether a blank in this style cannot be seen.
fn is_plain(style: Style) -> bool {
    let no_ground = matches!(style.bg, None | Some(Color::Reset));
    no_ground && !style.add_modifier.intersects(Modifier::REVERSED | Modifier::UNDERLINED)
}

/// Returns the escape sequence that sets a style.
fn sequence(style: Style) -> String {
    let mut codes = "0".to_owned();
    for (modifier, code) in [(Modifier::BOLD, ";1"), (Modifier::DIM, ";2"), (Modifier::REVERSED, ";7")] {
        if style.add_modifier.contains(modifier) {
            codes += code;
        }
    }
    for (colour, ground) in [(style.fg, 3), (style.bg, 4)] {
        let _ = match colour {
            Some(Color::Rgb(red, green, blue)) => write!(codes, ";{ground}8;2;{red};{green};{blue}"),
            Some(Color::Indexed(index)) => write!(codes, ";{ground}8;5;{index}"),
            Some(Color::Black) => write!(codes, ";{ground}0"),
            Some(Color::White) => write!(codes, ";{ground}7"),
            _ => Ok(()),
        };
    }
    format!("\x1b[{codes}m")
}
