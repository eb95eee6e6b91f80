//! How an object is named inside caches and queues: by place, not by UID, because a watch tells places.

use std::cmp::Ordering;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Namespace and name of an object; the namespace of a cluster-scoped object is empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey(
    /// `namespace/name`, and neither holds a slash: ten thousand of these are kept, several times over, and one
    /// allocation is less than two.
    Box<str>,
);

impl ObjectKey {
    pub fn namespaced(namespace: &str, name: &str) -> Self {
        Self(format!("{namespace}/{name}").into())
    }

    pub fn cluster(name: &str) -> Self {
        Self::namespaced("", name)
    }

    pub fn of(metadata: &ObjectMeta) -> Self {
        Self::namespaced(
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default(),
        )
    }

    pub fn namespace(&self) -> Option<&str> {
        Some(self.parts().0).filter(|namespace| !namespace.is_empty())
    }

    pub fn name(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').unwrap_or_default()
    }
}

/// By namespace first: `a/z` comes before `a-b/c`.
impl Ord for ObjectKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parts().cmp(&other.parts())
    }
}

impl PartialOrd for ObjectKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.strip_prefix('/').unwrap_or(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_place() {
        let (inside, outside) = (ObjectKey::namespaced("shop", "web"), ObjectKey::cluster("system:node"));
        assert_eq!((inside.namespace(), inside.name(), inside.to_string().as_str()), (Some("shop"), "web", "shop/web"));
        assert_eq!((outside.namespace(), outside.name()), (None, "system:node"));
        assert_eq!(outside.to_string(), "system:node");
    }

    #[test]
    fn namespaces_stay_together() {
        let mut keys = [("a-b", "c"), ("a", "z"), ("", "n"), ("a", "b")].map(|(a, b)| ObjectKey::namespaced(a, b));
        keys.sort();
        assert_eq!(keys.map(|key| key.to_string()), ["n", "a/b", "a/z", "a-b/c"]);
    }
}
