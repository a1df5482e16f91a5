//! Text of other programs on its way to a terminal or a log.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Escapes characters that a terminal acts on or that change the order of the line: control characters (line breaks and the escape of
/// sequences too), marks of the writing direction, and invisible separators. Other characters are unchanged.
///
/// ```
/// use glake_units::printable;
/// assert_eq!(printable("GPU \u{1b}[2J\u{202e}0\n"), r"GPU \u{1b}[2J\u{202e}0\n");
/// ```
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(acts) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        let _ = match letter {
            '\n' | '\r' | '\t' => write!(escaped, "{}", letter.escape_default()),
            _ if acts(letter) => write!(escaped, "{}", letter.escape_unicode()),
            _ => escaped.write_char(letter),
        };
    }
    Cow::Owned(escaped)
}

/// Returns whether a character does more than to be shown.
fn acts(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            // Marks, embeddings, overrides and isolates of the writing direction.
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            // Separators of lines and paragraphs, characters without width or meaning, and noncharacters.
            | '\u{2028}' | '\u{2029}' | '\u{200b}' | '\u{2060}' | '\u{feff}' | '\u{fdd0}'..='\u{fdef}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_characters_that_act_are_escaped() {
        for plain in ["", "llama-8b/17", "Größe 模型 \\ \"x\" │ ─ 🦀", "a b"] {
            assert!(matches!(printable(plain), Cow::Borrowed(text) if text == plain), "{plain}");
        }
        for (text, escaped) in [
            ("\u{1b}]0;title\u{7}", r"\u{1b}]0;title\u{7}"),
            ("a\r\nb\tc", r"a\r\nb\tc"),
            ("\u{9b}31m\u{7f}\0", r"\u{9b}31m\u{7f}\u{0}"),
            ("a\u{202e}b\u{2069}c\u{200f}", r"a\u{202e}b\u{2069}c\u{200f}"),
            ("\u{2028}\u{feff}\u{fdd0}", r"\u{2028}\u{feff}\u{fdd0}"),
        ] {
            assert_eq!(printable(text), escaped);
            assert!(!printable(text).chars().any(acts));
        }
    }
}
