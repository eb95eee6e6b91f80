//! Small things that ten thousand objects have, each in one allocation.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use vitivirt_api::machine::{LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, LABEL_ON_DELETE, MANAGED_BY};

/// What most of these objects say, in the order of their fields: what is said here costs each of them next to nothing.
/// What changes here changes only how small they are.
const DICTIONARY: &[u8] = concat!(
    r#"{"efi":{"secureBoot":true},"smm":{"enabled":true},"acpi":{},"apic":{},"hyperv":{"relaxed":{},"vapic":{}},"#,
    r#""cdrom":{"bus":"sata"},"containerDisk":{"image":"quay.io/containerdisks/"},"storageClass":"default","#,
    r#""accessMode":"ReadWriteOnce","volumeMode":"Filesystem","onDelete":"Delete","networkName":"pod","#,
    r#""bootOrder":["disk","network"],"multus":{"networkName":"},"bridge":{},"powerState":"Running","#,
    r##""secretRef":{"name":"key":"userdata"},"networkData":"userData":"#cloud-config\nhostname: packages:\n  - ssh"##,
    r#"{"runStrategy":"Always","template":{"metadata":{"labels":{"cluster.vitistack.io/cluster-name":"","#,
    r#""vitistack.io/machine":"","vitistack.io/managed-by":"kubevirt-operator"}},"spec":{"domain":{"cpu":{"cores":2,"#,
    r#""sockets":1,"threads":1},"devices":{"disks":[{"bootOrder":1,"disk":{"bus":"virtio"},"name":"root"},"#,
    r#"{"disk":{"bus":"virtio"},"name":"cloudinitdisk"}],"interfaces":[{"macAddress":"02:","masquerade":{},"#,
    r#""model":"virtio","name":"default"}],"networkInterfaceMultiqueue":true},"firmware":{"serial":"","uuid":""},"#,
    r#""machine":{"type":"q35"},"memory":{"guest":"4Gi"}},"networks":[{"name":"default","pod":{}}],"volumes":[{"name":"#,
    r#""root","persistentVolumeClaim":{"claimName":"-root"}},{"cloudInitNoCloud":{"secretRef":{"name":"-cloudinit"}},"#,
    r#""name":"cloudinitdisk"}]}}}{"apiVersion":"vitistack.io/v1alpha1","kind":"Machine","metadata":{"#,
    r#""creationTimestamp":"2026-01-01T00:00:00Z","finalizers":["machine.vitistack.io/cleanup"],"generation":1,"#,
    r#""labels":{"name":"","namespace":"default","uid":""},"spec":{"template":"small","resources":{"cpu":{"cores":2},"#,
    r#""memory":{"size":"4Gi"}},"disks":[{"name":"root","size":"20Gi"}],"networks":[{"name":"default"}],"cloudInit":{"#,
    r##""userData":"#cloud-config\n"}},"status":{"phase":"Running","conditions":[{"lastTransitionTime":"##,
    r#""2026-01-01T00:00:00Z","message":"the machine is running","observedGeneration":1,"reason":"Running","#,
    r#""status":"True","type":"Ready"},{"lastTransitionTime":"2026-01-01T00:00:00Z","message":"the VirtualMachine is "#,
    r#"Running","observedGeneration":1,"reason":"VMCreated","status":"True","type":"VirtualMachineReady"},"#,
    r#"{"lastTransitionTime":"2026-01-01T00:00:00Z","message":"every disk has its PVC","observedGeneration":1,"#,
    r#""reason":"PVCBound","status":"True","type":"StorageReady"},{"lastTransitionTime":"2026-01-01T00:00:00Z","#,
    r#""message":"every interface has its network","observedGeneration":1,"reason":"NetworkConfigured","status":"#,
    r#""True","type":"NetworkReady"}],"vmName":"","vmiName":"","ipAddresses":["10."],"nodeName":"node-","#,
    r#""lastUpdated":"2026-01-01T00:00:00Z","resourceVersion":"","observedGeneration":1}}"#,
)
.as_bytes();

/// JSON that is seldom read, compressed: most Machines are at rest most of the time, and the size of all of them is what
/// decides how much memory the operator needs. The same value has the same bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CompressedJson(Box<[u8]>);

impl CompressedJson {
    /// Nothing here can fail but a value that is no JSON, and ours came as JSON.
    pub(crate) fn of<T: Serialize>(value: &T) -> Self {
        let json = serde_json::to_vec(value).unwrap_or_default();
        Self(compress(&json).unwrap_or_default().into())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Nothing, if it is bigger than that.
    pub(crate) fn at_most(self, limit: usize) -> Self {
        if self.len() > limit { Self::default() } else { self }
    }

    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        let json = unsqueeze(&self.0).map_err(serde_json::Error::io)?;
        serde_json::from_slice(&json)
    }
}

fn compress(json: &[u8]) -> io::Result<Vec<u8>> {
    COMPRESS.with_borrow_mut(|compress| squeeze_with(compress, json))
}

thread_local! {
    /// A quarter of a megabyte each: there is one, and not one per object.
    static COMPRESS: RefCell<Compress> = RefCell::new(Compress::new(Compression::new(6), false));
}

fn squeeze_with(compress: &mut Compress, json: &[u8]) -> io::Result<Vec<u8>> {
    compress.reset();
    compress.set_dictionary(DICTIONARY)?;
    let mut out = Vec::with_capacity(json.len() / 2 + 64);
    loop {
        let read = usize::try_from(compress.total_in()).unwrap_or(usize::MAX);
        let rest = json.get(read..).unwrap_or_default();
        if compress.compress_vec(rest, &mut out, FlushCompress::Finish)? == Status::StreamEnd {
            return Ok(out);
        }
        out.reserve(256);
    }
}

fn unsqueeze(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut decompress = Decompress::new(false);
    decompress.set_dictionary(DICTIONARY)?;
    let mut out = Vec::with_capacity(bytes.len() * 6 + 256);
    loop {
        let read = usize::try_from(decompress.total_in()).unwrap_or(usize::MAX);
        let rest = bytes.get(read..).unwrap_or_default();
        let before = (decompress.total_in(), out.len());
        if decompress.decompress_vec(rest, &mut out, FlushDecompress::Finish)? == Status::StreamEnd {
            return Ok(out);
        }
        // It ends in the middle.
        if before == (decompress.total_in(), out.len()) && out.len() < out.capacity() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.reserve(out.len() + 256);
    }
}

/// Labels as `key=value` lines: neither may hold `=` in its key or a line break anywhere. What every object of ours
/// carries is one character, which no label may hold either.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels(Box<str>);

/// Keys that are written short.
const SHORT: [(char, &str); 4] =
    [('\u{1}', LABEL_MACHINE), ('\u{2}', LABEL_MACHINE_UID), ('\u{3}', LABEL_ON_DELETE), ('\u{4}', LABEL_MANAGED_BY)];
/// The value that is left out.
const USUAL: (&str, &str) = (LABEL_MANAGED_BY, MANAGED_BY);

impl Labels {
    pub(crate) fn of(metadata: &ObjectMeta) -> Self {
        let line = |(key, value): (&String, &String)| match SHORT.iter().find(|(_, known)| known == key) {
            Some((short, known)) if (*known, value.as_str()) == USUAL => short.to_string(),
            Some((short, LABEL_MANAGED_BY)) => format!("{short}={value}"),
            Some((short, _)) => format!("{short}{value}"),
            None => format!("{key}={value}"),
        };
        let lines: Vec<String> = metadata.labels.iter().flatten().map(line).collect();
        Self(lines.join("\n").into())
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter_map(|line| {
            let Some((short, known)) = SHORT.iter().find(|(short, _)| line.starts_with(*short)) else {
                return line.split_once('=');
            };
            let value = line.strip_prefix(*short).unwrap_or_default();
            match (*known, value) {
                (LABEL_MANAGED_BY, "") => Some(USUAL),
                (LABEL_MANAGED_BY, other) => Some((*known, other.strip_prefix('=').unwrap_or(other))),
                _ => Some((*known, value)),
            }
        })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.pairs().find(|(have, _)| *have == key).map(|(_, value)| value)
    }

    pub(crate) fn to_map(&self) -> BTreeMap<String, String> {
        self.pairs().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

/// Of a set of words that is known beforehand, the one that `word` is; anything else is the last of them.
pub(crate) fn known(words: &'static [&'static str], word: &str) -> &'static str {
    words.iter().find(|known| **known == word).or(words.last()).copied().unwrap_or_default()
}

/// At most `limit` bytes of what a guest or a server says, cut between characters.
pub(crate) fn bounded(text: &str, limit: usize) -> Box<str> {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_survive() {
        let labels: BTreeMap<String, String> = [("a/b", "c"), ("empty", ""), ("z", "1-2_3.4")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let packed = Labels::of(&ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() });
        assert_eq!(packed.to_map(), labels);
        assert_eq!(packed.get("empty"), Some(""));
        assert_eq!(packed.get("a"), None);
        assert!(Labels::of(&ObjectMeta::default()).to_map().is_empty());
    }

    #[test]
    fn our_own_labels_are_short_and_survive() {
        for managed_by in [MANAGED_BY, "", "somebody", "=odd"] {
            let labels: BTreeMap<String, String> = [
                (LABEL_MANAGED_BY, managed_by),
                (LABEL_MACHINE, "web-1"),
                (LABEL_MACHINE_UID, "2f1c1a52-9e0e-4cf5-8f8c-0d3c5be8c7a1"),
                (LABEL_ON_DELETE, "Delete"),
                ("vitistack.io/machine-template", "small"),
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
            let packed = Labels::of(&ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() });
            assert_eq!(packed.to_map(), labels);
            assert_eq!(packed.get(LABEL_MANAGED_BY), Some(managed_by));
            assert!(packed.0.len() < 110, "{}", packed.0.len());
        }
        let empty = BTreeMap::from([(LABEL_MACHINE.to_owned(), String::new())]);
        let packed = Labels::of(&ObjectMeta { labels: Some(empty.clone()), ..ObjectMeta::default() });
        assert_eq!(packed.to_map(), empty);
    }

    #[test]
    fn squeezed_json_comes_back() {
        let value =
            serde_json::json!({"a": ["lastTransitionTime", "lastTransitionTime", 1, null], "b": "ø".repeat(500)});
        let squeezed = CompressedJson::of(&value);
        assert_eq!(squeezed.read::<serde_json::Value>().unwrap(), value);
        assert_eq!(squeezed, CompressedJson::of(&value));
        assert!(squeezed.0.len() < 200);
        // An object of the usual kind is nearly all dictionary.
        let usual: serde_json::Value = serde_json::json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web-17", "namespace": "shop", "generation": 1,
                "uid": "2f1c1a52-9e0e-4cf5-8f8c-0d3c5be8c7a1", "finalizers": ["machine.vitistack.io/cleanup"]},
            "spec": {"template": "small", "disks": [{"name": "root", "size": "20Gi"}]},
            "status": {"phase": "Running", "conditions": [{"lastTransitionTime": "2026-03-04T05:06:07Z",
                "message": "the machine is running", "observedGeneration": 1, "reason": "Running", "status": "True",
                "type": "Ready"}]},
        });
        let squeezed = CompressedJson::of(&usual);
        assert_eq!(squeezed.read::<serde_json::Value>().unwrap(), usual);
        assert!(squeezed.len() * 3 < usual.to_string().len(), "{} of {}", squeezed.len(), usual.to_string().len());
        let big = serde_json::json!("x".repeat(1 << 20));
        assert_eq!(CompressedJson::of(&big).read::<serde_json::Value>().unwrap(), big);
        let cut = CompressedJson(squeezed.0[..squeezed.0.len() / 2].into());
        assert!(cut.read::<serde_json::Value>().is_err());
        assert!(CompressedJson::default().read::<serde_json::Value>().is_err());
    }

    #[test]
    fn unknown_words_are_the_last() {
        assert_eq!(known(&["Bound", "Pending", ""], "Bound"), "Bound");
        assert_eq!(known(&["Bound", "Pending", ""], "Strange"), "");
        assert_eq!(&*bounded("øøø", 3), "ø");
    }
}
