//! A tree as text.

/// A line and what hangs from it.
pub(super) struct Tree {
    label: String,
    branches: Vec<Tree>,
}

impl Tree {
    pub(super) fn new(label: impl Into<String>, branches: Vec<Tree>) -> Self {
        Tree { label: label.into(), branches }
    }

    /// Its lines, each ended.
    pub(super) fn draw(&self) -> String {
        let mut text = format!("{}\n", self.label);
        self.draw_branches("", &mut text);
        text
    }

    fn draw_branches(&self, indent: &str, text: &mut String) {
        for (i, branch) in self.branches.iter().enumerate() {
            let (fork, below) =
                if i + 1 < self.branches.len() { ("├─ ", "│  ") } else { ("└─ ", "   ") };
            text.push_str(indent);
            text.push_str(fork);
            text.push_str(&branch.label);
            text.push('\n');
            branch.draw_branches(&format!("{indent}{below}"), text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_hang_from_their_line() {
        let leaf = |label: &str| Tree::new(label, Vec::new());
        let tree = Tree::new("root", vec![Tree::new("a", vec![leaf("x"), leaf("y")]), leaf("b")]);
        assert_eq!(tree.draw(), "root\n├─ a\n│  ├─ x\n│  └─ y\n└─ b\n");
    }
}
