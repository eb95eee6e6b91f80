//! A type name has one meaning in the workspace, so a search for it finds one definition.

use std::collections::BTreeMap;

use super::{files, rust_source::RustSource};

/// Names of parallel types: each program has its own type with the same role, so that a reader of one program finds the
/// same thing in the other one.
const PARALLEL: [&str; 12] = [
    "Arguments",
    "Caches",
    "Command",
    "EventRouter",
    "Observed",
    "Observer",
    "PlanArguments",
    "Reader",
    "RenderArguments",
    "RunArguments",
    "Settings",
    "StartSettings",
];

/// The structs, enums, traits and type aliases that a file defines outside of functions' bodies and impls, with their
/// lines.
fn defined_types(source: &RustSource) -> Vec<(usize, &str)> {
    let words: Vec<(usize, &str)> = source.code.iter().map(|(line, word)| (*line, word.as_str())).collect();
    let mut types = Vec::new();
    // Whether each open brace belongs to a module.
    let mut braces: Vec<bool> = Vec::new();
    let mut module_begins = false;
    for (at, (line, word)) in words.iter().enumerate() {
        match *word {
            "mod" => module_begins = true,
            ";" => module_begins = false,
            "{" => {
                braces.push(module_begins);
                module_begins = false;
            }
            "}" => drop(braces.pop()),
            "struct" | "enum" | "trait" | "type" | "union" if braces.iter().all(|is_module| *is_module) => {
                let name = words.get(at + 1).map(|(_, name)| *name);
                types.extend(name.filter(|name| name.starts_with(char::is_uppercase)).map(|name| (*line, name)));
            }
            _ => {}
        }
    }
    types
}

#[test]
fn a_type_name_has_one_definition() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for folder in files::crate_folders() {
        for (file, source) in &files::production_files(&format!("{folder}/src")) {
            for (line, name) in defined_types(source) {
                places.entry(name.to_owned()).or_default().push(format!("{}:{line}", file.path));
            }
        }
    }
    let repeated: BTreeMap<&str, &Vec<String>> =
        places.iter().filter(|(_, places)| places.len() > 1).map(|(name, places)| (name.as_str(), places)).collect();
    let mut problems: Vec<String> = repeated
        .iter()
        .filter(|(name, _)| !PARALLEL.contains(*name))
        .map(|(name, places)| format!("{name}: {}", places.join(", ")))
        .collect();
    let obsolete = PARALLEL.into_iter().filter(|name| !repeated.contains_key(name));
    problems.extend(obsolete.map(|name| format!("{name}: remove it from PARALLEL, it has one definition")));
    assert!(problems.is_empty(), "a search for a type must find one definition:\n{}", problems.join("\n"));
}

mod tests {
    use super::*;

    #[test]
    fn definitions_are_found_in_modules_but_not_in_functions_and_impls() {
        let source = "pub struct A; mod m { enum B {} } trait C { type D; } type E = u8; \
                      impl C for A { type D = u8; } fn f() { struct G; } #[cfg(test)] mod tests { struct H; }";
        let source = RustSource::parse(source);
        let names: Vec<&str> = defined_types(&source).into_iter().map(|(_, name)| name).collect();
        assert_eq!(names, ["A", "B", "C", "E"]);
    }
}
