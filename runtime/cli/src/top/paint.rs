//! Colours and patterns of a frame, which tell owners of memory apart.
//!
//! Eight colours after Okabe and Ito, with grey in place of black: people with any colour vision tell them apart, on dark and on light
//! terminals. Where a terminal has no colours, patterns do; where it has no block characters, letters do.

use std::collections::BTreeMap;

use ratatui::style::{Color, Modifier, Style};

/// Abilities of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// All colours.
    Rgb,
    /// 256 colours.
    Indexed,
    /// No colours, and block characters.
    Hatched,
    /// No colours, and ASCII alone.
    Ascii,
}

/// Okabe and Ito's colours, with grey in place of black; and the nearest of 256.
const COLOURS: [((u8, u8, u8), u8); 8] = [
    ((0x56, 0xb4, 0xe9), 74),
    ((0xe6, 0x9f, 0x00), 178),
    ((0x00, 0x9e, 0x73), 36),
    ((0xcc, 0x79, 0xa7), 175),
    ((0xf0, 0xe4, 0x42), 227),
    ((0xd5, 0x5e, 0x00), 166),
    ((0x00, 0x72, 0xb2), 25),
    ((0xb0, 0xb0, 0xb0), 145),
];
/// Colours on which text is white.
const DARK: [usize; 2] = [5, 6];
/// Patterns of owners beyond the eighth, in colour.
const LAYERS: [&str; 4] = [" ", "▓", "▚", "▒"];
/// Patterns of owners without colours.
const HATCHES: [&str; 8] = ["█", "▒", "▚", "▓", "▞", "▙", "▟", "▛"];
const LETTERS: [&str; 8] = ["#", "=", "+", "%", "*", "@", "o", "x"];

/// Appearance of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Character of a cell without text.
    pub symbol: &'static str,
    /// Style of that character.
    pub style: Style,
    /// Style of text in the cell.
    pub text: Style,
}

impl Look {
    /// Returns the look of a terminal, from its variables: `NO_COLOR`, `TERM` and `COLORTERM`.
    pub fn from_variables(no_color: Option<&str>, term: Option<&str>, colorterm: Option<&str>) -> Look {
        let term = term.unwrap_or_default();
        if term == "dumb" {
            return Look::Ascii;
        }
        if no_color.is_some_and(|value| !value.is_empty()) {
            return Look::Hatched;
        }
        match colorterm {
            Some("truecolor" | "24bit") => Look::Rgb,
            _ if term.contains("256color") || term.contains("direct") => Look::Indexed,
            _ => Look::Hatched,
        }
    }

    /// Returns whether the look has colours.
    pub fn has_colours(self) -> bool {
        matches!(self, Look::Rgb | Look::Indexed)
    }

    fn colour(self, mark: usize) -> Color {
        let ((red, green, blue), indexed) = COLOURS[mark % COLOURS.len()];
        if self == Look::Rgb { Color::Rgb(red, green, blue) } else { Color::Indexed(indexed) }
    }

    /// Returns the fill of the owner with a mark.
    pub fn owner(self, mark: usize) -> Fill {
        let plain = Style::new();
        match self {
            Look::Hatched => Fill { symbol: HATCHES[mark % HATCHES.len()], style: plain, text: plain },
            Look::Ascii => Fill { symbol: LETTERS[mark % LETTERS.len()], style: plain, text: plain },
            Look::Rgb | Look::Indexed => {
                let colour = self.colour(mark);
                let ink = if DARK.contains(&(mark % COLOURS.len())) { Color::White } else { Color::Black };
                let solid = plain.bg(colour).fg(ink);
                match LAYERS[mark / COLOURS.len() % LAYERS.len()] {
                    " " => Fill { symbol: " ", style: solid, text: solid },
                    layer => Fill { symbol: layer, style: plain.fg(colour), text: solid },
                }
            }
        }
    }

    /// Returns the fill of free memory in the pool of the owner with a mark.
    pub fn waste(self, mark: usize) -> Fill {
        let plain = Style::new();
        match self {
            Look::Ascii => Fill { symbol: "-", style: plain, text: plain },
            Look::Hatched => Fill { symbol: "░", style: plain, text: plain },
            Look::Rgb | Look::Indexed => {
                Fill { symbol: "░", style: plain.fg(self.colour(mark)), text: plain }
            }
        }
    }

    /// Returns the fill of other programs' memory, and of the driver's.
    pub fn others(self) -> Fill {
        let plain = Style::new();
        Fill { symbol: if self == Look::Ascii { "/" } else { "╱" }, style: plain, text: plain }
    }

    /// Returns the fill of free memory.
    pub fn free(self) -> Fill {
        let plain = Style::new();
        let faint = if self.has_colours() { plain.add_modifier(Modifier::DIM) } else { plain };
        Fill { symbol: if self == Look::Ascii { "." } else { "·" }, style: faint, text: plain }
    }

    /// Returns the fill of free memory that no worker gets.
    pub fn kept(self) -> Fill {
        Fill { symbol: ":", ..self.free() }
    }

    /// Returns a character for a share of 1.
    pub fn step(self, share: f64) -> &'static str {
        const BLOCKS: [&str; 8] = ["▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
        const SIGNS: [&str; 8] = ["_", ".", ":", "-", "=", "+", "*", "#"];
        let steps = if self == Look::Ascii { SIGNS } else { BLOCKS };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let at = (share.clamp(0.0, 1.0) * 7.0).round() as usize;
        steps[at.min(7)]
    }
}

/// Marks of owners: each keeps its mark, and so its colour, while it is shown.
#[derive(Clone, Debug, Default)]
pub struct Marks(BTreeMap<String, usize>);

impl Marks {
    /// Gives marks to new owners and forgets those that are gone.
    pub fn update<'a>(&mut self, owners: impl Iterator<Item = &'a str>) {
        let mut owners: Vec<&str> = owners.collect();
        owners.sort_unstable();
        self.0.retain(|known, _| owners.binary_search(&known.as_str()).is_ok());
        let mut taken: Vec<usize> = self.0.values().copied().collect();
        taken.sort_unstable();
        let (mut next, mut at) = (0, 0);
        for owner in owners {
            if self.0.contains_key(owner) {
                continue;
            }
            while taken.get(at) == Some(&next) {
                (next, at) = (next + 1, at + 1);
            }
            self.0.insert(owner.to_owned(), next);
            next += 1;
        }
    }

    /// Returns the mark of an owner.
    pub fn of(&self, owner: &str) -> usize {
        self.0.get(owner).copied().unwrap_or_default()
    }

    /// Returns the letter of a mark, for a segment that is too narrow for a name.
    pub fn letter(mark: usize) -> char {
        let letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
        letters.chars().nth(mark).unwrap_or('?')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_look_follows_the_terminal() {
        let look = Look::from_variables;
        assert_eq!(look(None, Some("xterm-256color"), None), Look::Indexed);
        assert_eq!(look(Some(""), Some("xterm"), Some("truecolor")), Look::Rgb);
        assert_eq!(look(Some("1"), Some("xterm-256color"), Some("truecolor")), Look::Hatched);
        assert_eq!(look(None, Some("vt100"), None), Look::Hatched);
        assert_eq!(look(None, Some("dumb"), Some("truecolor")), Look::Ascii);
        assert_eq!(look(None, None, None), Look::Hatched);
    }

    #[test]
    fn the_first_owners_look_different_in_every_look() {
        for (look, most) in [(Look::Rgb, 32), (Look::Indexed, 32), (Look::Hatched, 8), (Look::Ascii, 8)] {
            let fills: Vec<Fill> = (0..most).map(|mark| look.owner(mark)).collect();
            for (at, fill) in fills.iter().enumerate() {
                assert!(!fills[..at].contains(fill), "{look:?} {at}");
                assert_ne!(fill, &look.waste(at));
                assert_ne!(fill.symbol, look.others().symbol);
            }
        }
    }

    #[test]
    fn an_owner_keeps_its_mark_and_a_free_one_is_given_again() {
        let mut marks = Marks::default();
        marks.update(["b", "a"].into_iter());
        assert_eq!((marks.of("a"), marks.of("b")), (0, 1));
        marks.update(["b", "c", "d"].into_iter());
        assert_eq!((marks.of("b"), marks.of("c"), marks.of("d")), (1, 0, 2));
    }
}
