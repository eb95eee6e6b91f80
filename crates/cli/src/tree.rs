//! Trees and tables as text.

use std::fmt::Write as _;

use vitivirt_api::view::TreeStep;

/// An object with the objects that it consists of, one per line, with its facts below it.
pub fn tree_text(step: &TreeStep) -> String {
    let mut text = String::new();
    add(&mut text, step, "", "");
    text
}

/// `first` is before the line of the step, `rest` before everything below it.
fn add(text: &mut String, step: &TreeStep, first: &str, rest: &str) {
    let name = if step.name.is_empty() { String::new() } else { format!(" {}", step.name) };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{first}{} {}{name}: {}", step.state.symbol(), step.kind, one_line(&step.summary));
    let below = if step.steps.is_empty() { "  " } else { "│ " };
    for fact in &step.facts {
        let _ = writeln!(text, "{rest}{below}  {}: {}", fact.label, one_line(&fact.value));
    }
    for (index, part) in step.steps.iter().enumerate() {
        let is_last = index + 1 == step.steps.len();
        let (branch, line) = if is_last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        add(text, part, &format!("{rest}{branch}"), &format!("{rest}{line}"));
    }
}

/// Rows in aligned columns, below a line of titles, as kubectl prints them.
pub fn table_text(titles: &[&str], rows: &[Vec<String>]) -> String {
    let cells = |row: &[String]| -> Vec<String> { row.iter().map(|cell| one_line(cell)).collect() };
    let titles: Vec<String> = titles.iter().map(|title| (*title).to_owned()).collect();
    let lines: Vec<Vec<String>> = [titles].into_iter().chain(rows.iter().map(|row| cells(row))).collect();
    let columns = lines.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let mut text = String::new();
    for line in &lines {
        let padded = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let padded: Vec<String> = padded.collect();
        let _ = writeln!(text, "{}", padded.join("   ").trim_end());
    }
    text
}

/// Text of a server or a guest without characters that control a terminal.
fn one_line(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use vitivirt_api::view::StepState;

    use super::*;

    #[test]
    fn a_tree_has_one_line_for_each_object_and_fact() {
        let pod = TreeStep::new("Pod", "", StepState::Waiting, "does not\nexist");
        let vm = TreeStep::new("VirtualMachine", "web", StepState::Ok, "Running").fact("node", "a").steps([pod]);
        let pvc = TreeStep::new("PersistentVolumeClaim", "web-root", StepState::Failed, "\u{1b}[31mLost");
        let tree =
            TreeStep::new("Machine", "web", StepState::Ok, "Running, ready").fact("template", "small").steps([vm, pvc]);
        let expected = "\
✓ Machine web: Running, ready
│   template: small
├─ ✓ VirtualMachine web: Running
│  │   node: a
│  └─ … Pod: does not exist
└─ ✗ PersistentVolumeClaim web-root:  [31mLost
";
        assert_eq!(tree_text(&tree), expected);
    }

    #[test]
    fn columns_are_aligned_without_spaces_at_the_end() {
        let rows = [vec!["web".to_owned(), "Running".to_owned()], vec!["database".to_owned(), String::new()]];
        assert_eq!(table_text(&["NAME", "PHASE"], &rows), "NAME       PHASE\nweb        Running\ndatabase\n");
    }
}
