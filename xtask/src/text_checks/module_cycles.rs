//! The top-level modules of a crate form layers: none depends on a module that depends on it. So a reader can start with
//! the lowest module and needs no other one to understand it.

use std::collections::{BTreeMap, BTreeSet};

use super::{files, rust_source::RustSource};

/// The crates that have layers.
const CRATES: [&str; 3] = ["crates/install", "crates/machine", "crates/runtime"];

/// The top-level modules that each top-level module names.
type ModuleGraph = BTreeMap<String, BTreeSet<String>>;

/// The names that follow `crate::`, also in a list such as `crate::{a, b::{c, d}}`.
fn crate_paths(source: &RustSource) -> BTreeSet<String> {
    let words: Vec<&str> = source.code.iter().map(|(_, word)| word.as_str()).collect();
    let mut names = BTreeSet::new();
    for at in (0..words.len()).filter(|at| words[*at..].starts_with(&["crate", ":", ":"])) {
        let mut rest = words[at + 3..].iter().copied();
        match rest.next() {
            Some("{") => {
                let mut depth = 1;
                let mut begins = true;
                for word in rest {
                    match word {
                        "{" => depth += 1,
                        "}" => depth -= 1,
                        "," if depth == 1 => {
                            begins = true;
                            continue;
                        }
                        name if begins => drop(names.insert(name.to_owned())),
                        _ => {}
                    }
                    begins = false;
                    if depth == 0 {
                        break;
                    }
                }
            }
            Some(name) => drop(names.insert(name.to_owned())),
            None => {}
        }
    }
    names
}

/// The names that lib.rs exports from its modules, with the module of each.
fn exports(source: &RustSource, modules: &BTreeSet<String>) -> BTreeMap<String, String> {
    let words: Vec<&str> = source.code.iter().map(|(_, word)| word.as_str()).collect();
    let mut exports = BTreeMap::new();
    for at in (0..words.len()).filter(|at| words[*at] == "use") {
        let path = words[at + 1..].iter().copied().take_while(|word| *word != ";");
        let mut path = path.skip_while(|word| ["crate", "self", ":"].contains(word));
        if let Some(module) = path.next().filter(|name| modules.contains(*name)) {
            exports.extend(path.map(|name| (name.to_owned(), module.to_owned())));
        }
    }
    exports
}

fn module_graph(folder: &str) -> ModuleGraph {
    let prefix = format!("{folder}/src/");
    let files = files::production_files(&format!("{folder}/src"));
    let module = |path: &str| {
        let path = path.strip_prefix(&prefix).unwrap_or(path);
        path.split('/').next().unwrap_or(path).trim_end_matches(".rs").to_owned()
    };
    let modules: BTreeSet<String> = files.iter().map(|(file, _)| module(&file.path)).collect();
    let library = files.iter().find(|(file, _)| module(&file.path) == "lib");
    let exports = library.map(|(_, source)| exports(source, &modules)).unwrap_or_default();
    let mut graph = ModuleGraph::new();
    for (file, source) in &files {
        let module = module(&file.path);
        // The crate's root names every module.
        if module == "lib" {
            continue;
        }
        let named = crate_paths(source).into_iter().map(|name| exports.get(&name).cloned().unwrap_or(name));
        let used = named.filter(|name| modules.contains(name) && *name != module);
        graph.entry(module.clone()).or_default().extend(used);
    }
    graph
}

/// A shortest cycle, as the modules along it. The last one uses the first one.
fn cycle(graph: &ModuleGraph) -> Option<Vec<&str>> {
    let cycles = graph.keys().filter_map(|start| {
        let mut paths = vec![vec![start.as_str()]];
        let mut seen = BTreeSet::new();
        while !paths.is_empty() {
            let mut longer = Vec::new();
            for path in paths {
                for next in path.last().and_then(|last| graph.get(*last)).into_iter().flatten() {
                    if next == start {
                        return Some(path);
                    }
                    if seen.insert(next) {
                        longer.push(path.iter().copied().chain([next.as_str()]).collect());
                    }
                }
            }
            paths = longer;
        }
        None
    });
    cycles.min_by_key(Vec::len)
}

#[test]
fn no_top_level_modules_of_a_crate_depend_on_each_other() {
    for folder in CRATES {
        let graph = module_graph(folder);
        assert!(graph.len() > 5, "{folder} has modules");
        let cycle = cycle(&graph).map(|cycle| cycle.join(" -> "));
        assert_eq!(cycle, None, "{folder}: move what both modules need into a module below them");
    }
}

mod tests {
    use super::*;

    fn paths(source: &str) -> Vec<String> {
        crate_paths(&RustSource::parse(source)).into_iter().collect()
    }

    #[test]
    fn modules_are_found_in_every_form_of_a_path() {
        let source = "use crate::{a::{self, x}, b, c::y::{d, e}}; use crate::f::z; fn g() { crate::h::i() } \
                      // crate::comment::x\n #[cfg(test)] mod tests { use crate::test_only::x; }";
        assert_eq!(paths(source), ["a", "b", "c", "f", "h"]);
    }

    #[test]
    fn exports_of_the_crate_belong_to_their_modules() {
        let modules: BTreeSet<String> = ["a", "b"].map(str::to_owned).into();
        let exports = exports(&RustSource::parse("mod a; pub use a::{X, y}; pub use crate::b::Z; use c::W;"), &modules);
        let of = |name: &str| exports.get(name).map(String::as_str);
        assert_eq!([of("X"), of("y"), of("Z"), of("W")], [Some("a"), Some("a"), Some("b"), None]);
    }

    #[test]
    fn a_shortest_cycle_is_reported() {
        let graph = |edges: &[(&str, &str)]| {
            let mut graph = ModuleGraph::new();
            for (from, to) in edges {
                graph.entry((*from).to_owned()).or_default().insert((*to).to_owned());
            }
            graph
        };
        assert_eq!(cycle(&graph(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
        let two = graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "c")]);
        assert_eq!(cycle(&two), Some(vec!["c", "d"]));
    }
}
