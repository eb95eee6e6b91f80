//! Links between the pages of the docs. They must lead to a file and a heading, and no page names a line of a file.

use std::path::{Component, Path, PathBuf};

use super::files::{self, SourceFile};
use crate::programs::root;

/// A Markdown link, with the line on which it stands.
#[derive(Debug, PartialEq, Eq)]
struct DocLink {
    line: usize,
    target: String,
}

/// The lines of a page outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
            return None;
        }
        (!in_code).then_some((index + 1, line))
    })
}

/// Replaces code spans by spaces.
fn without_code_spans(line: &str) -> String {
    line.split('`').enumerate().map(|(index, part)| if index % 2 == 0 { part } else { " " }).collect()
}

/// `[text](target)`, and `[name]: target` on a line by itself.
fn links(text: &str) -> Vec<DocLink> {
    let mut links = Vec::new();
    for (line, content) in prose(text) {
        let content = without_code_spans(content);
        let inline = content.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        let reference = content.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, target)| target);
        links.extend(inline.chain(reference).map(|target| DocLink { line, target: target.trim().to_owned() }));
    }
    links
}

/// The anchors that GitHub gives the headings of a page.
fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    let mut anchors: Vec<String> = Vec::new();
    for (_, heading) in headings {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let anchor: String = title
            .chars()
            .filter(|character| character.is_alphanumeric() || " -_".contains(*character))
            .map(|character| if character == ' ' { '-' } else { character })
            .collect();
        let repeated = (1..).map(|number| format!("{anchor}-{number}"));
        let unique = std::iter::once(anchor.clone()).chain(repeated).find(|candidate| !anchors.contains(candidate));
        anchors.extend(unique);
    }
    anchors
}

/// What is wrong with a link of the page at `path`, which is relative to the repository's root.
fn broken(path: &str, target: &str) -> Option<String> {
    if ["https://", "http://", "mailto:"].iter().any(|scheme| target.starts_with(scheme)) {
        return None;
    }
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let page = if file.is_empty() {
        root().join(path)
    } else {
        let folder = Path::new(path).parent().unwrap_or(Path::new(""));
        without_dots(&root().join(folder).join(file))
    };
    if !page.starts_with(root()) {
        return Some("leads out of the repository".to_owned());
    }
    if !page.exists() {
        return Some("file not found".to_owned());
    }
    let anchor = anchor?;
    if page.extension().is_none_or(|extension| extension != "md") {
        return Some("anchor in a file that is not Markdown".to_owned());
    }
    let headings = anchors(&SourceFile::read(&page).text);
    (!headings.iter().any(|heading| heading == anchor))
        .then(|| format!("no such heading; headings: {}", headings.join(", ")))
}

fn without_dots(path: &Path) -> PathBuf {
    let mut resolved = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(resolved.pop()),
            Component::CurDir => {}
            other => resolved.push(other),
        }
    }
    resolved
}

/// The words of a page that name a line of a file, such as a path with `:12` after it.
fn line_references(text: &str) -> Vec<(usize, &str)> {
    let words = text.lines().enumerate().flat_map(|(index, line)| {
        line.split(|character: char| character.is_whitespace() || "`()[],;".contains(character))
            .map(move |word| (index + 1, word))
    });
    let extensions = [".rs", ".md", ".yaml", ".toml"];
    let is_reference = |word: &str| {
        word.split_once(':').is_some_and(|(path, line)| {
            extensions.iter().any(|extension| path.ends_with(extension))
                && line.starts_with(|digit: char| digit.is_ascii_digit())
        }) || word
            .split_once("#L")
            .is_some_and(|(path, line)| path.contains('.') && line.starts_with(|digit: char| digit.is_ascii_digit()))
    };
    words.filter(|(_, word)| is_reference(word)).collect()
}

#[test]
fn no_page_refers_to_a_line_of_a_file() {
    let mut problems = Vec::new();
    for SourceFile { path, text } in files::documents().into_iter().chain(files::chart_pages()) {
        let references = line_references(&text);
        problems.extend(
            references.into_iter().map(|(line, word)| format!("{path}:{line}: {word}: name the file or a type")),
        );
    }
    assert!(problems.is_empty(), "lines move with every edit:\n{}", problems.join("\n"));
}

#[test]
fn every_link_of_the_docs_leads_to_a_file_and_a_heading() {
    let mut problems = Vec::new();
    for SourceFile { path, text } in files::documents().into_iter().chain(files::chart_pages()) {
        for DocLink { line, target } in links(&text) {
            if let Some(problem) = broken(&path, &target) {
                problems.push(format!("{path}:{line}: ({target}): {problem}"));
            }
        }
    }
    assert!(problems.is_empty(), "broken links:\n{}", problems.join("\n"));
}

mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_code() {
        let text = "[a](b.md) and [c](d.md#e)\n```\n[no](f.md)\n```\n`[no](g.md)` [h](i.md)\n[j]: k.md\n- [x]\n";
        let links: Vec<(usize, String)> = links(text).into_iter().map(|link| (link.line, link.target)).collect();
        let expected = [(1, "b.md"), (1, "d.md#e"), (5, "i.md"), (6, "k.md")];
        assert_eq!(links, expected.map(|(line, target)| (line, target.to_owned())));
    }

    #[test]
    fn anchors_are_those_of_github() {
        let text = "# One, two: `three`\n## A_b - c\n```\n# no\n```\n## Same\n## Same\n";
        assert_eq!(anchors(text), ["one-two-three", "a_b---c", "same", "same-1"]);
    }

    #[test]
    fn a_broken_link_is_reported_with_its_problem() {
        for target in ["writing.md", "writing.md#glossary", "#glossary", "../README.md", "../examples", "https://x.y/z"]
        {
            assert_eq!(broken("docs/writing.md", target), None, "{target}");
        }
        for (target, problem) in [
            ("missing.md", "file not found"),
            ("writing.md#missing", "no such heading"),
            ("#missing", "no such heading"),
            ("../xtask/src/main.rs#main", "not Markdown"),
            ("../../elsewhere.md", "out of the repository"),
        ] {
            let message = broken("docs/writing.md", target).unwrap();
            assert!(message.contains(problem), "{target}: {message}");
        }
    }

    #[test]
    fn references_to_lines_are_found() {
        let text = "see `src/main.rs:12`\n[x](a/b.rs#L5-L9), [y](b.md#life) at 10:30\nkey: value.rs: 3\n";
        assert_eq!(line_references(text), [(1, "src/main.rs:12"), (2, "a/b.rs#L5-L9")]);
    }
}
