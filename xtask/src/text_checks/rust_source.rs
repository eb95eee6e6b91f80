//! Comments, string literals and words of a Rust file, with their lines. A small tokenizer rather than a parser: it knows
//! comments, strings, chars and lifetimes, which is enough to distinguish text from code.

use std::ops::Range;

/// A piece of text in a Rust file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fragment {
    pub(super) kind: FragmentKind,
    /// The line on which each line of `text` stands.
    pub(super) lines: Vec<usize>,
    pub(super) text: String,
    /// Whether an item under `#[cfg(test)]` contains it.
    pub(super) is_test: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FragmentKind {
    Comment,
    /// With escapes resolved.
    String,
}

/// The fragments of a file, its code as words, and the names of the modules that the file declares as `#[cfg(test)] mod name;`.
pub(super) struct RustSource {
    pub(super) fragments: Vec<Fragment>,
    pub(super) test_modules: Vec<String>,
    /// Identifiers, keywords and punctuation outside `#[cfg(test)]`, with their lines.
    pub(super) code: Vec<(usize, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Comment(String),
    String(String),
    /// An identifier, keyword or number.
    Word(String),
    Punctuation(char),
}

struct Tokenizer {
    characters: Vec<char>,
    at: usize,
    line: usize,
}

impl Tokenizer {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.characters.get(self.at + ahead).copied()
    }

    fn bump(&mut self) -> Option<char> {
        let next = self.peek(0)?;
        self.at += 1;
        self.line += usize::from(next == '\n');
        Some(next)
    }

    fn take_while(&mut self, accepts: impl Fn(char) -> bool) -> String {
        let mut taken = String::new();
        while let Some(next) = self.peek(0).filter(|next| accepts(*next)) {
            taken.push(next);
            self.bump();
        }
        taken
    }

    fn next(&mut self) -> Option<Token> {
        self.take_while(char::is_whitespace);
        let token = match (self.peek(0)?, self.peek(1)) {
            ('/', Some('/')) => Token::Comment(self.line_comment()),
            ('/', Some('*')) => Token::Comment(self.block_comment()),
            ('"', _) => Token::String(self.quoted()),
            ('\'', _) => return self.char_or_lifetime(),
            (first, _) if is_word(first) => self.word_or_prefixed_string(),
            (other, _) => {
                self.bump();
                Token::Punctuation(other)
            }
        };
        Some(token)
    }

    fn line_comment(&mut self) -> String {
        self.take_while(|next| next == '/');
        self.take_while(|next| next == '!');
        self.take_while(|next| next != '\n')
    }

    /// Block comments nest.
    fn block_comment(&mut self) -> String {
        let mut text = String::new();
        let mut depth = 0;
        loop {
            match (self.peek(0), self.peek(1)) {
                (Some('/'), Some('*')) => depth += 1,
                (Some('*'), Some('/')) => depth -= 1,
                (Some(other), _) => {
                    text.push(other);
                    self.bump();
                    continue;
                }
                (None, _) => return text,
            }
            self.bump();
            self.bump();
            if depth == 0 {
                return text;
            }
        }
    }

    /// A string with escapes. Keeps the number of lines: a line break that a backslash removes becomes a line break of
    /// the text, because only words matter here.
    fn quoted(&mut self) -> String {
        self.bump();
        let mut text = String::new();
        while let Some(next) = self.bump() {
            match next {
                '"' => break,
                '\\' => match self.bump() {
                    Some('\n') => text.push('\n'),
                    Some('n' | 'r' | 't') => text.push(' '),
                    Some('u') => {
                        self.take_while(|next| next != '}');
                        self.bump();
                        text.push('\u{fffd}');
                    }
                    Some('x') => {
                        self.bump();
                        self.bump();
                        text.push('\u{fffd}');
                    }
                    Some(other) => text.push(other),
                    None => break,
                },
                other => text.push(other),
            }
        }
        text
    }

    /// The rest of a raw string after its prefix: `#"…"#` with any number of hashes.
    fn raw(&mut self) -> String {
        let hashes = self.take_while(|next| next == '#').len();
        self.bump();
        let mut text = String::new();
        while let Some(next) = self.bump() {
            if next == '"' && (0..hashes).all(|ahead| self.peek(ahead) == Some('#')) {
                self.at += hashes;
                break;
            }
            text.push(next);
        }
        text
    }

    /// Skips `'x'` and `'\n'`. A lifetime is a quote before an identifier that no quote follows.
    fn char_or_lifetime(&mut self) -> Option<Token> {
        let is_char = self.peek(1) == Some('\\') || self.peek(2) == Some('\'');
        self.bump();
        if is_char {
            if self.bump() == Some('\\') {
                self.bump();
            }
            self.take_while(|next| next != '\'');
            self.bump();
        } else {
            self.take_while(is_word);
        }
        self.next()
    }

    fn word_or_prefixed_string(&mut self) -> Token {
        let word = self.take_while(is_word);
        let hashes = (0..).take_while(|ahead| self.peek(*ahead) == Some('#')).count();
        let quote_follows = self.peek(hashes) == Some('"');
        match word.as_str() {
            "r" | "br" | "cr" if quote_follows => Token::String(self.raw()),
            "b" | "c" if quote_follows && hashes == 0 => Token::String(self.quoted()),
            _ => Token::Word(word),
        }
    }
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The tokens, each with the line on which it begins.
fn tokens(text: &str) -> Vec<(usize, Token)> {
    let mut tokenizer = Tokenizer { characters: text.chars().collect(), at: 0, line: 1 };
    let mut tokens = Vec::new();
    while let Some(token) = tokenizer.next() {
        let line_breaks = match &token {
            Token::Comment(text) | Token::String(text) => text.matches('\n').count(),
            Token::Word(_) | Token::Punctuation(_) => 0,
        };
        tokens.push((tokenizer.line - line_breaks, token));
    }
    tokens
}

impl RustSource {
    pub(super) fn parse(text: &str) -> Self {
        let tokens = tokens(text);
        let mut test_modules = Vec::new();
        let test_code = test_code(&tokens, &mut test_modules);
        let mut fragments: Vec<Fragment> = Vec::new();
        let mut previous_was_comment = false;
        for (index, (line, token)) in tokens.iter().enumerate() {
            let (kind, text) = match token {
                Token::Comment(text) => (FragmentKind::Comment, text),
                Token::String(text) => (FragmentKind::String, text),
                _ => {
                    previous_was_comment = false;
                    continue;
                }
            };
            let lines = (0..=text.matches('\n').count()).map(|offset| line + offset);
            match fragments.last_mut() {
                // A comment of several lines is one text, so that a phrase is found across a line break.
                Some(last) if previous_was_comment && kind == FragmentKind::Comment && continues(last, *line) => {
                    last.text.push('\n');
                    last.text.push_str(text);
                    last.lines.extend(lines);
                }
                _ => fragments.push(Fragment {
                    kind,
                    lines: lines.collect(),
                    text: text.clone(),
                    is_test: test_code.iter().any(|range| range.contains(&index)),
                }),
            }
            previous_was_comment = kind == FragmentKind::Comment;
        }
        let code = tokens.iter().enumerate().filter(|(index, _)| !test_code.iter().any(|range| range.contains(index)));
        let code = code
            .filter_map(|(_, (line, token))| match token {
                Token::Word(word) => Some((*line, word.clone())),
                Token::Punctuation(character) => Some((*line, character.to_string())),
                Token::Comment(_) | Token::String(_) => None,
            })
            .collect();
        Self { fragments, test_modules, code }
    }
}

fn continues(fragment: &Fragment, line: usize) -> bool {
    fragment.lines.last().is_some_and(|last| last + 1 == line)
}

/// The tokens of the items under `#[cfg(test)]`.
fn test_code(tokens: &[(usize, Token)], test_modules: &mut Vec<String>) -> Vec<Range<usize>> {
    let code: Vec<(usize, &Token)> = tokens
        .iter()
        .enumerate()
        .filter(|(_, (_, token))| !matches!(token, Token::Comment(_)))
        .map(|(index, (_, token))| (index, token))
        .collect();
    let is = |at: usize, expected: &str| match code.get(at) {
        Some((_, Token::Word(word))) => word == expected,
        Some((_, Token::Punctuation(character))) => expected.chars().eq([*character]),
        _ => false,
    };
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < code.len() {
        let attribute = ["#", "[", "cfg", "(", "test", ")", "]"];
        if !attribute.iter().enumerate().all(|(offset, expected)| is(at + offset, expected)) {
            at += 1;
            continue;
        }
        let start = at;
        at += attribute.len();
        let mut path = None;
        while is(at, "#") {
            if is(at + 2, "path") {
                path = code.get(at + 4).and_then(|(_, token)| match token {
                    Token::String(path) => Some(path.clone()),
                    _ => None,
                });
            }
            while at < code.len() && !is(at, "]") {
                at += 1;
            }
            at += 1;
        }
        if is(at, "mod") && is(at + 2, ";") {
            if let Some((_, Token::Word(name))) = code.get(at + 1) {
                test_modules.push(path.unwrap_or_else(|| name.clone()));
            }
            at += 3;
        } else {
            at = end_of_item(&code, at);
        }
        let index = |at: usize| code.get(at).map_or(tokens.len(), |(index, _)| *index);
        ranges.push(index(start)..index(at));
    }
    ranges
}

/// The position after the item's closing brace, or after its semicolon if that comes first.
fn end_of_item(code: &[(usize, &Token)], mut at: usize) -> usize {
    let mut depth = 0;
    while let Some((_, token)) = code.get(at) {
        at += 1;
        match token {
            Token::Punctuation('{' | '(' | '[') => depth += 1,
            Token::Punctuation('}') if depth == 1 => return at,
            Token::Punctuation('}' | ')' | ']') => depth -= 1,
            Token::Punctuation(';') if depth == 0 => return at,
            _ => {}
        }
    }
    at
}

mod tests {
    use super::*;

    fn texts(source: &str, kind: FragmentKind) -> Vec<(usize, String)> {
        let fragments = RustSource::parse(source).fragments;
        fragments
            .into_iter()
            .filter(|fragment| fragment.kind == kind)
            .map(|fragment| (fragment.lines[0], fragment.text))
            .collect()
    }

    fn strings(source: &str) -> Vec<String> {
        texts(source, FragmentKind::String).into_iter().map(|(_, text)| text).collect()
    }

    fn comments(source: &str) -> Vec<(usize, String)> {
        texts(source, FragmentKind::Comment)
    }

    #[test]
    fn every_kind_of_comment_is_found_with_its_line() {
        let source = "//! module\n\nfn f() {} // after code\n/* block\n of /* nested */ lines */\n/// item\nstruct S;";
        let expected = [(1, " module"), (3, " after code\n block\n of  nested  lines \n item")];
        assert_eq!(comments(source), expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn comment_lines_that_follow_each_other_are_one_text() {
        let source = "// one\n// two\n\n// three\nlet x = 1; // four\n";
        let expected = [(1, " one\n two"), (4, " three"), (5, " four")];
        assert_eq!(comments(source), expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn every_kind_of_string_is_found() {
        let source = r####"["plain", r"raw \", r#"a "quoted" one"#, b"bytes", br##"both"##, c"c", ""]"####;
        let expected = ["plain", "raw \\", "a \"quoted\" one", "bytes", "both", "c", ""];
        assert_eq!(strings(source), expected);
    }

    #[test]
    fn escapes_are_resolved() {
        assert_eq!(
            strings(r#"["a \"b\" c", "d\\", "e\nf", "g\u{1f}h", "i\x1bj"]"#),
            ["a \"b\" c", "d\\", "e f", "g\u{fffd}h", "i\u{fffd}j"]
        );
    }

    #[test]
    fn a_string_of_several_lines_has_the_number_of_its_first_line() {
        let source = "let x = \"first \\\n   second\";\nlet y = \"third\";";
        let found = texts(source, FragmentKind::String);
        assert_eq!(found, [(1, "first \n   second".to_owned()), (3, "third".to_owned())]);
        assert_eq!(RustSource::parse(source).fragments[0].lines, [1, 2]);
    }

    #[test]
    fn chars_and_lifetimes_are_not_strings() {
        let source = r#"fn f<'a>(x: &'a str) -> char { let q = '"'; let e = '\''; let b = b'"'; 'l: loop { "s" } }"#;
        assert_eq!(strings(source), ["s"]);
        assert_eq!(strings("let u = '\\u{22}'; let s = \"t\";"), ["t"]);
        assert_eq!(strings("x.split('/'); \"// no comment\""), ["// no comment"]);
    }

    #[test]
    fn raw_identifiers_are_not_strings() {
        assert_eq!(strings("let r#type = \"x\"; r#fn();"), ["x"]);
    }

    #[test]
    fn code_under_cfg_test_is_marked_as_test_code() {
        let source = r#"
            const A: &str = "one";
            #[cfg(test)]
            #[allow(dead_code, reason = "two")]
            mod tests { fn f() { "three"; { "four" } } }
            const B: &str = "five";
            #[cfg(test)]
            const C: [&str; 1] = ["six"];
            const D: &str = "seven";
            #[cfg(test)]
            mod elsewhere;
            #[cfg(test)]
            #[path = "other.rs"]
            mod named;
            const E: &str = "eight";
        "#;
        let parsed = RustSource::parse(source);
        let outside: Vec<&str> = parsed
            .fragments
            .iter()
            .filter(|fragment| !fragment.is_test)
            .map(|fragment| fragment.text.as_str())
            .collect();
        assert_eq!(outside, ["one", "five", "seven", "eight"]);
        assert_eq!(parsed.test_modules, ["elsewhere", "other.rs"]);
    }
}
