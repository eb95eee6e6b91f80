//! The phrases that docs/writing.md forbids, searched in everything that a user or a contributor reads.

use std::collections::BTreeMap;

use super::{
    files::{self, SourceFile},
    rust_source::{Fragment, FragmentKind, RustSource},
};
use crate::programs::root;

const WRITING: &str = "docs/writing.md";
/// The heading above the table of forbidden phrases. The table is the last one of the page.
const HEADING: &str = "## Words that this project does not use";
/// A phrase is allowed where it is the beginning of one of these.
const ALLOWED: [&str; 1] = ["the reference operator"];
const TABLE: &str = "| not | instead |\n|---|---|\n";

/// One row of the table.
struct ForbiddenPhrase {
    /// In lower case.
    phrase: String,
    replacement: String,
}

/// The table of docs/writing.md. The page and this check cannot differ, because the check has no second list.
fn forbidden_phrases() -> Vec<ForbiddenPhrase> {
    let page = SourceFile::read(&root().join(WRITING)).text;
    let (_, section) = page.split_once(HEADING).expect("docs/writing.md has the section");
    let (_, rows) = section.split_once(TABLE).expect("the section has the table");
    rows.lines()
        .take_while(|line| line.starts_with('|'))
        .map(|row| {
            let mut cells = row.trim_matches('|').split('|').map(str::trim);
            let mut cell = || cells.next().unwrap_or_else(|| panic!("{WRITING}: a row without two cells: {row}"));
            ForbiddenPhrase { phrase: cell().to_lowercase(), replacement: cell().to_owned() }
        })
        .collect()
}

/// Text whose words are separated by single spaces, in lower case, and the line of each byte.
struct NormalizedText {
    text: String,
    lines: Vec<usize>,
}

impl NormalizedText {
    /// `lines` are the line numbers of `text` in its file. Line breaks, indentation, and the marks with which a line of
    /// a comment or a list begins count as space, so a phrase is found across lines.
    fn new(text: &str, lines: impl Iterator<Item = usize>) -> Self {
        let mut normalized = Self { text: String::new(), lines: Vec::new() };
        for (content, line) in text.lines().zip(lines) {
            let content = content.trim_start_matches(|mark: char| mark.is_whitespace() || "#>*-/!".contains(mark));
            for word in content.split_whitespace() {
                let word = word.to_lowercase();
                normalized.lines.extend(std::iter::repeat_n(line, word.len() + 1));
                normalized.text.push_str(&word);
                normalized.text.push(' ');
            }
        }
        normalized
    }

    fn of_fragment(fragment: &Fragment) -> Self {
        Self::new(&fragment.text, fragment.lines.iter().copied())
    }

    fn of_file(text: &str) -> Self {
        Self::new(text, 1..)
    }

    /// The lines on which the phrase begins. Only whole words count, and a hyphen is part of a word: a phrase is not
    /// found in `network-attachment-definitions`.
    fn occurrences(&self, phrase: &str) -> Vec<usize> {
        let is_word = |character: Option<char>| {
            character.is_some_and(|character| character.is_alphanumeric() || "_-".contains(character))
        };
        self.text
            .match_indices(phrase)
            .filter(|(at, _)| !ALLOWED.iter().any(|allowed| self.text[*at..].starts_with(allowed)))
            .filter(|(at, found)| {
                !is_word(self.text[..*at].chars().next_back()) && !is_word(self.text[at + found.len()..].chars().next())
            })
            .map(|(at, _)| self.lines[at])
            .collect()
    }
}

struct Finding {
    path: String,
    line: usize,
    phrase: String,
    replacement: String,
}

fn search(path: &str, text: &NormalizedText, phrases: &[ForbiddenPhrase], findings: &mut Vec<Finding>) {
    for ForbiddenPhrase { phrase, replacement } in phrases {
        findings.extend(text.occurrences(phrase).into_iter().map(|line| Finding {
            path: path.to_owned(),
            line,
            phrase: phrase.clone(),
            replacement: replacement.clone(),
        }));
    }
}

/// Fails with every finding, and with their number per crate or page.
fn assert_none(findings: &[Finding]) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut message = String::new();
    for Finding { path, line, phrase, replacement } in findings {
        message.push_str(&format!("{path}:{line}: \"{phrase}\": use: {replacement}\n"));
        let area = path.strip_prefix("crates/").and_then(|path| path.split('/').next()).unwrap_or(path);
        *counts.entry(area).or_default() += 1;
    }
    for (area, count) in &counts {
        message.push_str(&format!("{count:6}  {area}\n"));
    }
    assert!(findings.is_empty(), "{} phrases that {WRITING} forbids:\n{message}", findings.len());
}

/// Crates whose strings reach users: as conditions, events, logs, help, or as the output of a command.
pub(super) const CRATES_WITH_MESSAGES: [&str; 9] = [
    "crates/api",
    "crates/cli",
    "crates/install",
    "crates/kubectl-vmachine",
    "crates/kubevirt-operator",
    "crates/machine",
    "crates/page",
    "crates/runtime",
    "crates/virt-operator",
];

#[test]
fn no_forbidden_phrase_is_in_a_message() {
    let phrases = forbidden_phrases();
    let mut findings = Vec::new();
    for folder in CRATES_WITH_MESSAGES {
        for (file, source) in &files::production_files(&format!("{folder}/src")) {
            for fragment in &source.fragments {
                // A string without a space is a name or a key, not prose.
                let is_message = fragment.kind == FragmentKind::String && fragment.text.trim().contains(' ');
                if is_message && !fragment.is_test {
                    search(&file.path, &NormalizedText::of_fragment(fragment), &phrases, &mut findings);
                }
            }
        }
    }
    assert_none(&findings);
}

#[test]
fn no_forbidden_phrase_is_in_the_docs() {
    let phrases = forbidden_phrases();
    let mut findings = Vec::new();
    for mut file in files::documents().into_iter().chain(files::chart_pages()) {
        if file.path == WRITING {
            // The table itself.
            let (before, _) = file.text.split_once(HEADING).expect("docs/writing.md has the section");
            file.text = before.to_owned();
        }
        search(&file.path, &NormalizedText::of_file(&file.text), &phrases, &mut findings);
    }
    assert_none(&findings);
}

#[test]
fn no_forbidden_phrase_is_in_a_manifest() {
    let phrases = forbidden_phrases();
    let mut findings = Vec::new();
    for file in files::manifests() {
        search(&file.path, &NormalizedText::of_file(&file.text), &phrases, &mut findings);
    }
    assert_none(&findings);
}

/// Doc comments of arguments and of custom resources are help texts and CRD descriptions.
#[test]
fn no_forbidden_phrase_is_in_a_comment() {
    let phrases = forbidden_phrases();
    let mut findings = Vec::new();
    for folder in files::crate_folders() {
        let tests = Some(format!("{folder}/tests")).filter(|tests| root().join(tests).is_dir());
        for file in [format!("{folder}/src")].into_iter().chain(tests).flat_map(|folder| files::rust_files(&folder)) {
            for fragment in RustSource::parse(&file.text).fragments {
                if fragment.kind == FragmentKind::Comment {
                    search(&file.path, &NormalizedText::of_fragment(&fragment), &phrases, &mut findings);
                }
            }
        }
    }
    assert_none(&findings);
}

mod tests {
    use super::*;

    fn lines_with(phrase: &str, text: &str) -> Vec<usize> {
        NormalizedText::of_file(text).occurrences(phrase)
    }

    #[test]
    fn the_table_is_read() {
        let phrases = forbidden_phrases();
        let row_for_told = phrases.iter().find(|row| row.phrase == "told").unwrap();
        assert!(row_for_told.replacement.contains("reported"));
        assert!(phrases.iter().all(|row| !row.phrase.is_empty() && !row.replacement.is_empty()));
        let mut unique: Vec<&str> = phrases.iter().map(|row| row.phrase.as_str()).collect();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), phrases.len(), "a phrase has two rows");
    }

    #[test]
    fn only_whole_words_count() {
        assert_eq!(lines_with("told", "retold\nit was told.\nTold: (told)\ntold_by\nwell-told"), [2, 3, 3]);
    }

    #[test]
    fn phrases_are_found_across_lines() {
        assert_eq!(lines_with("goes on by itself", "one\n/// it goes\n/// on by\n/// itself, then"), [2]);
        assert_eq!(lines_with("the pass", "# the\n#   pass"), [1]);
        assert_eq!(lines_with("the reference", "the reference\nThe reference\noperator"), [1]);
    }
}
