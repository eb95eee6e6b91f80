//! Compact forms of what the caches hold for every object. The caches of ten thousand Machines decide how much memory
//! the operator needs: see `cargo xtask bench machines`.

use std::{cell::RefCell, collections::BTreeMap, io};

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Serialize, de::DeserializeOwned};
use vitivirt_api::machine::{
    LABEL_CLUSTER, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY, LABEL_ON_DELETE, LABEL_RESTORED_FROM,
    LABEL_TEMPLATE, MANAGED_BY,
};

/// Text that most objects contain, in the order of their fields: deflate stores text from the dictionary as a short
/// reference. A change of the dictionary changes only the size of the compressed objects.
const DICTIONARY: &[u8] = concat!(
    r#"{"efi":{"secureBoot":true},"smm":{"enabled":true},"acpi":{},"apic":{},"hyperv":{"relaxed":{},"vapic":{}},"#,
    "; disk root has no source, so the guest has nothing to boot from unless an operating system was installed on the disk; ",
    "create the disk with a source, or boot an installer with bootOrder; see ",
    "https://github.com/vitistack/kubevirt-operator/blob/main/docs/first-machine.md",
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
    r#""2026-01-01T00:00:00Z","message":"Machine is running","observedGeneration":1,"reason":"Running","#,
    r#""status":"True","type":"Ready"},{"lastTransitionTime":"2026-01-01T00:00:00Z","message":"Machine is run"#,
    r#"ning","observedGeneration":1,"reason":"VMCreated","status":"True","type":"VirtualMachineReady"},"#,
    r#"{"lastTransitionTime":"2026-01-01T00:00:00Z","message":"All disks are ready","observedGeneration":1,"#,
    r#""reason":"PVCBound","status":"True","type":"StorageReady"},{"lastTransitionTime":"2026-01-01T00:00:00Z","#,
    r#""message":"All networks are ready","observedGeneration":1,"reason":"NetworkConfigured","status":"#,
    r#""True","type":"NetworkReady"}],"vmName":"","vmiName":"","ipAddresses":["10."],"nodeName":"node-","#,
    r#""lastUpdated":"2026-01-01T00:00:00Z","resourceVersion":"","observedGeneration":1}}"#,
)
.as_bytes();

/// Compressed JSON, for objects that are rarely read: most Machines do not change for a long time. Equal values have
/// equal bytes. The test below checks that a typical Machine needs less than a third of its JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CompressedJson(Box<[u8]>);

impl CompressedJson {
    /// Serialization cannot fail, because every value was parsed from JSON. Compression cannot fail either.
    pub(crate) fn from_value<T: Serialize>(value: &T) -> Self {
        let json = serde_json::to_vec(value).unwrap_or_default();
        Self(compress(&json).unwrap_or_default().into())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Empty if it has more than `limit` bytes.
    pub(crate) fn empty_if_longer_than(self, limit: usize) -> Self {
        if self.len() > limit { Self::default() } else { self }
    }

    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        let json = decompress(&self.0).map_err(serde_json::Error::io)?;
        serde_json::from_slice(&json)
    }
}

fn compress(json: &[u8]) -> io::Result<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|compress| compress_with(compress, json))
}

thread_local! {
    /// Its state needs a quarter of a megabyte, so each thread has one compressor for all objects.
    static COMPRESSOR: RefCell<Compress> = RefCell::new(Compress::new(Compression::new(6), false));
}

fn compress_with(compress: &mut Compress, json: &[u8]) -> io::Result<Vec<u8>> {
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

fn decompress(bytes: &[u8]) -> io::Result<Vec<u8>> {
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
        // The data is truncated.
        if before == (decompress.total_in(), out.len()) && out.len() < out.capacity() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.reserve(out.len() + 256);
    }
}

/// The labels that the operator reads. Kubernetes limits each label of an object but not their number, so a tenant could
/// fill the memory of the operator with others.
const READ_LABELS: [&str; 7] = [
    LABEL_MACHINE,
    LABEL_MACHINE_UID,
    LABEL_ON_DELETE,
    LABEL_MANAGED_BY,
    LABEL_CLUSTER,
    LABEL_TEMPLATE,
    LABEL_RESTORED_FROM,
];

/// Removes the labels that the operator does not read. One of them stays if there is no other: it shows that the object has
/// labels, so that a patch adds to them.
pub(crate) fn retain_read_labels(labels: &mut BTreeMap<String, String>) {
    let first = labels.first_key_value().map(|(key, value)| (key.clone(), value.clone()));
    labels.retain(|key, _| READ_LABELS.contains(&key.as_str()));
    if labels.is_empty() {
        labels.extend(first);
    }
}

/// The longest annotation that is cached. A tenant can write longer ones; they count as absent.
const ANNOTATION_LIMIT: usize = 4096;

/// An annotation that the operator reads.
pub(crate) fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    let value = metadata.annotations.as_ref()?.get(name)?;
    (value.len() <= ANNOTATION_LIMIT).then_some(value)
}

/// The labels that the operator reads as `key=value` lines, in one allocation instead of two for each label. Labels cannot
/// contain `=` or a line break. The operator's own labels, which every object has, are one control character each, which
/// labels cannot contain either.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels(Box<str>);

/// The codes of the operator's labels.
const LABEL_CODES: [(char, &str); 4] =
    [('\u{1}', LABEL_MACHINE), ('\u{2}', LABEL_MACHINE_UID), ('\u{3}', LABEL_ON_DELETE), ('\u{4}', LABEL_MANAGED_BY)];
/// The label whose value is omitted.
const DEFAULT_VALUE: (&str, &str) = (LABEL_MANAGED_BY, MANAGED_BY);

impl Labels {
    pub(crate) fn from_metadata(metadata: &ObjectMeta) -> Self {
        let line = |(key, value): (&String, &String)| match LABEL_CODES.iter().find(|(_, known)| known == key) {
            Some((code, known)) if (*known, value.as_str()) == DEFAULT_VALUE => code.to_string(),
            Some((code, LABEL_MANAGED_BY)) => format!("{code}={value}"),
            Some((code, _)) => format!("{code}{value}"),
            None => format!("{key}={value}"),
        };
        let mut labels = metadata.labels.clone().unwrap_or_default();
        retain_read_labels(&mut labels);
        let lines: Vec<String> = labels.iter().map(line).collect();
        Self(lines.join("\n").into())
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter_map(|line| {
            let Some((code, known)) = LABEL_CODES.iter().find(|(code, _)| line.starts_with(*code)) else {
                return line.split_once('=');
            };
            let value = line.strip_prefix(*code).unwrap_or_default();
            match (*known, value) {
                (LABEL_MANAGED_BY, "") => Some(DEFAULT_VALUE),
                (LABEL_MANAGED_BY, other) => Some((*known, other.strip_prefix('=').unwrap_or(other))),
                _ => Some((*known, value)),
            }
        })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.pairs().find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    pub(crate) fn to_map(&self) -> BTreeMap<String, String> {
        self.pairs().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_back() {
        let labels: BTreeMap<String, String> = [(LABEL_CLUSTER, "c"), (LABEL_MACHINE, ""), (LABEL_TEMPLATE, "1-2_3.4")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let labels_read = Labels::from_metadata(&ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() });
        assert_eq!(labels_read.to_map(), labels);
        assert_eq!(labels_read.get(LABEL_MACHINE), Some(""));
        assert_eq!(labels_read.get("a"), None);
        assert!(Labels::from_metadata(&ObjectMeta::default()).to_map().is_empty());
    }

    #[test]
    fn labels_of_tenants_need_no_memory_but_show_that_there_are_some() {
        let foreign = (0..10_000).map(|number| (format!("example.com/label-{number}"), "x".repeat(63)));
        let mut labels: BTreeMap<String, String> = foreign.collect();
        let read = |labels: &BTreeMap<String, String>| {
            Labels::from_metadata(&ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() })
        };
        assert_eq!(read(&labels).to_map().len(), 1);
        labels.insert(LABEL_MACHINE.to_owned(), "web".to_owned());
        assert_eq!(read(&labels).to_map(), BTreeMap::from([(LABEL_MACHINE.to_owned(), "web".to_owned())]));
    }

    #[test]
    fn an_annotation_that_is_too_long_counts_as_absent() {
        let of = |value: &str| ObjectMeta {
            annotations: Some([("a".to_owned(), value.to_owned())].into()),
            ..ObjectMeta::default()
        };
        assert_eq!(annotation(&of("short"), "a"), Some("short"));
        assert_eq!(annotation(&of(&"x".repeat(ANNOTATION_LIMIT + 1)), "a"), None);
        assert_eq!(annotation(&of("short"), "b"), None);
    }

    #[test]
    fn the_labels_of_the_operator_are_short_and_read_back() {
        for managed_by in [MANAGED_BY, "", "other", "=odd"] {
            let labels: BTreeMap<String, String> = [
                (LABEL_MANAGED_BY, managed_by),
                (LABEL_MACHINE, "web-1"),
                (LABEL_MACHINE_UID, "2f1c1a52-9e0e-4cf5-8f8c-0d3c5be8c7a1"),
                (LABEL_ON_DELETE, "Delete"),
                ("vitistack.io/machine-template", "small"),
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
            let labels_read =
                Labels::from_metadata(&ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() });
            assert_eq!(labels_read.to_map(), labels);
            assert_eq!(labels_read.get(LABEL_MANAGED_BY), Some(managed_by));
            assert!(labels_read.0.len() < 110, "{}", labels_read.0.len());
        }
        let empty = BTreeMap::from([(LABEL_MACHINE.to_owned(), String::new())]);
        let labels_read = Labels::from_metadata(&ObjectMeta { labels: Some(empty.clone()), ..ObjectMeta::default() });
        assert_eq!(labels_read.to_map(), empty);
    }

    #[test]
    fn compressed_json_is_read_back() {
        let value =
            serde_json::json!({"a": ["lastTransitionTime", "lastTransitionTime", 1, null], "b": "ø".repeat(500)});
        let compressed = CompressedJson::from_value(&value);
        assert_eq!(compressed.read::<serde_json::Value>().unwrap(), value);
        assert_eq!(compressed, CompressedJson::from_value(&value));
        assert!(compressed.0.len() < 200);
        // Most of a typical object is in the dictionary.
        let typical: serde_json::Value = serde_json::json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine",
            "metadata": {"name": "web-17", "namespace": "shop", "generation": 1,
                "uid": "2f1c1a52-9e0e-4cf5-8f8c-0d3c5be8c7a1", "finalizers": ["machine.vitistack.io/cleanup"]},
            "spec": {"template": "small", "disks": [{"name": "root", "size": "20Gi"}]},
            "status": {"phase": "Running", "conditions": [{"lastTransitionTime": "2026-03-04T05:06:07Z",
                "message": "Machine is running", "observedGeneration": 1, "reason": "Running", "status": "True",
                "type": "Ready"}]},
        });
        let compressed = CompressedJson::from_value(&typical);
        assert_eq!(compressed.read::<serde_json::Value>().unwrap(), typical);
        assert!(
            compressed.len() * 3 < typical.to_string().len(),
            "{} of {}",
            compressed.len(),
            typical.to_string().len()
        );
        let big = serde_json::json!("x".repeat(1 << 20));
        assert_eq!(CompressedJson::from_value(&big).read::<serde_json::Value>().unwrap(), big);
        let truncated = CompressedJson(compressed.0[..compressed.0.len() / 2].into());
        assert!(truncated.read::<serde_json::Value>().is_err());
        assert!(CompressedJson::default().read::<serde_json::Value>().is_err());
    }
}
