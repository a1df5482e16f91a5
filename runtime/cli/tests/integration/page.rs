//! docs/CLI.md is what the command says of itself: `UPDATE=1 cargo test -p glake --test integration page` writes it anew.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::fs;

use clap::{Command, CommandFactory as _};
use glake::commands::Arguments;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/CLI.md");

const HEAD: &str = "\
# The command

What `glake --help` and `glake COMMAND --help` say, in one page. It is made from the command itself:
`UPDATE=1 cargo test -p glake --test integration page` writes it anew, and the tests compare it. What is measured and
how to read it stands in [benchmarks](benchmarks/README.md), the settings in [TUNING](TUNING.md).
";

/// A section for a command and for each below it.
fn section(command: &Command, above: &str, page: &mut String) {
    let name = format!("{above}{}", command.get_name());
    let depth = name.split(' ').count();
    let mut shown = command.clone().term_width(100);
    if depth > 1 {
        // What every command takes is said once, at the top.
        let everywhere: Vec<_> =
            command.get_arguments().filter(|a| a.is_global_set()).map(|a| a.get_id().clone()).collect();
        for id in everywhere {
            shown = shown.mut_arg(id, |argument| argument.hide(true));
        }
    }
    let help = shown.render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    page.push_str(&format!(
        "\n{} {name}\n\n```text\n{}\n```\n",
        "#".repeat(depth + 1),
        lines.join("\n").trim_end()
    ));
    for below in command.get_subcommands().filter(|below| below.get_name() != "help" && !below.is_hide_set())
    {
        section(below, &format!("{name} "), page);
    }
}

#[test]
fn the_page_is_what_the_command_says() {
    let mut command = Arguments::command();
    command.build();
    let mut page = HEAD.to_owned();
    section(&command, "", &mut page);
    if std::env::var_os("UPDATE").is_some_and(|value| value == "1") {
        fs::write(PAGE, &page).unwrap();
    }
    let kept = fs::read_to_string(PAGE).unwrap_or_default();
    assert!(
        kept == page,
        "docs/CLI.md is not what the command says: UPDATE=1 cargo test -p glake --test integration page writes it"
    );
    let wide: Vec<&str> = page.lines().filter(|line| line.chars().count() > 120).collect();
    assert!(wide.is_empty(), "{wide:#?}");
}
