//! The metric that counts the objects that the caches skip. The caches of `watch` supply the numbers.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, family::Family, gauge::Gauge},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ResourceLabel {
    pub(crate) resource: String,
}

pub(crate) fn encode_unreadable(
    gauge: &Family<ResourceLabel, Gauge>,
    mut encoder: DescriptorEncoder<'_>,
) -> Result<(), fmt::Error> {
    let help = "Objects that cannot be parsed and that the operator ignores, by resource";
    gauge.encode(encoder.encode_descriptor("unreadable_objects", help, None, MetricType::Gauge)?)
}

/// The same metric of a program without watches, for the list of the metrics in the docs.
#[derive(Debug)]
pub(super) struct UnreadableSample;

impl Collector for UnreadableSample {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = Family::<ResourceLabel, Gauge>::default();
        gauge.get_or_create(&ResourceLabel { resource: String::new() }).set(0);
        encode_unreadable(&gauge, encoder)
    }
}
