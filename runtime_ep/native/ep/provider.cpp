#include "ep/provider.h"

#include "ep/allocator.h"
#include "ep/compiled_node.h"
#include "ep/judge.h"
#include "ep/memcpy_kernels.h"

#include <algorithm>
#include <cctype>
#include <memory>
#include <vector>

namespace ep {
namespace {

Provider& from(ort::OrtEp* self) {
    return *static_cast<Provider*>(self);
}

std::string option_prefix() {
    std::string name = PROVIDER_NAME;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    return "ep." + name + ".";
}

bool switched_on(const std::string& name, const std::string& value) {
    if (value != "0" && value != "1") {
        throw ort::Failure(ort::ORT_INVALID_ARGUMENT, "the option " + name + " must be 0 or 1, got " + value);
    }
    return value == "1";
}

} // namespace

Options Options::of(const ort::OrtSessionOptions* session) {
    ort::OrtKeyValuePairs* entries = nullptr;
    ort::check(ort::api().GetSessionOptionsConfigEntries(session, &entries));
    const ort::KeyValuePairs owned(entries);
    const char* const* keys = nullptr;
    const char* const* values = nullptr;
    std::size_t count = 0;
    ort::api().GetKeyValuePairs(owned.get(), &keys, &values, &count);
    const std::string prefix = option_prefix();
    Options options;
    for (std::size_t i = 0; i < count; ++i) {
        const std::string key = keys[i];
        if (!key.starts_with(prefix)) {
            continue;
        }
        const std::string name = key.substr(prefix.size());
        if (name != "require_npu") {
            throw ort::Failure(
                ort::ORT_INVALID_ARGUMENT, "there is no option " + name + "; the only one is require_npu"
            );
        }
        options.require_npu = switched_on(name, values[i]);
    }
    return options;
}

Provider::Provider(Device& device, const Options& options, const ort::OrtLogger* logger)
    : OrtEp{},
      device_(device),
      options_(options),
      logger_(logger),
      weights_(device) {
    ort_version_supported = ort::runtime.version;
    GetName = get_name;
    GetCapability = get_capability;
    Compile = compile;
    ReleaseNodeComputeInfos = release_nodes;
    OnRunStart = on_run_start;
    CreateAllocator = create_allocator;
    CreateSyncStreamForDevice = create_stream;
    GetKernelRegistry = get_kernel_registry;
    IsConcurrentRunSupported = is_concurrent_run_supported;
    Sync = sync;
}

Provider::~Provider() {
    device_.settle();
}

void Provider::claim(const ort::OrtGraph* graph, ort::OrtEpGraphSupportInfo* support) {
    for (const ort::OrtNode* node : ort::nodes_of(graph)) {
        if (ort::domain_of(node) != operators::DOMAIN) {
            continue;
        }
        const ort::NodeFacts facts = ort::read_node(node);
        if (const auto reason = reason_to_decline(facts, cann::report().product)) {
            report_decline(describe(facts) + " runs on the CPU: " + *reason);
            if (!options_.require_npu) {
                continue;
            }
            // Claimed only to be refused with the reason by Compile: an error of this callback would only be logged.
        }
        const ort::OrtNodeFusionOptions fusion{ort::runtime.version, true};
        ort::check(ort::ep_api().EpGraphSupportInfo_AddNodesToFuse(support, &node, 1, &fusion));
    }
}

void Provider::report_decline(const std::string& sentence) {
    // The runtime asks several times, for one answer.
    if (!options_.require_npu && reported_.insert(sentence).second) {
        ort::check(
            ort::api().Logger_LogMessage(
                logger_, ort::ORT_LOGGING_LEVEL_WARNING, sentence.c_str(), "provider.cpp", __LINE__, "GetCapability"
            )
        );
    }
}

ort::OrtNodeComputeInfo* Provider::compile(const ort::OrtGraph* graph, const ort::OrtNode* fused) {
    const std::vector<const ort::OrtNode*> nodes = ort::nodes_of(graph);
    if (nodes.size() != 1) {
        throw ort::Failure(ort::ORT_INVALID_GRAPH, "one node was claimed, but several came back to be compiled");
    }
    const ort::NodeFacts facts = ort::read_node(nodes.front());
    const std::string& product = cann::report().product;
    if (const auto reason = reason_to_decline(facts, product)) {
        throw ort::Failure(
            ort::ORT_NOT_IMPLEMENTED,
            describe(facts) + " cannot run on the NPU (" + product + "), which require_npu demands: " + *reason
        );
    }
    try {
        return new CompiledNode(facts, ort::read_node(fused), weights_);
    } catch (const cann::Error& error) {
        throw cann::Error(error, describe(facts) + ": its weights cannot be put on the NPU: ", "");
    } catch (const ort::Failure& failure) {
        throw ort::Failure(failure.code(), describe(facts) + ": " + failure.what());
    }
}

void Provider::require_capability() const {
    if (options_.require_npu && capability_failure_) {
        throw ort::Failure(ort::ORT_FAIL, "require_npu: the model could not be searched: " + *capability_failure_);
    }
}

const char* Provider::get_name(const ort::OrtEp*) noexcept {
    return PROVIDER_NAME;
}

ort::OrtStatus*
Provider::get_capability(ort::OrtEp* self, const ort::OrtGraph* graph, ort::OrtEpGraphSupportInfo* support) noexcept {
    return ort::guarded([&] {
        try {
            from(self).claim(graph, support);
        } catch (const std::exception& error) {
            from(self).capability_failure_ = error.what();
            throw;
        }
    });
}

ort::OrtStatus* Provider::compile(
    ort::OrtEp* self, const ort::OrtGraph** graphs, const ort::OrtNode** fused, std::size_t count,
    ort::OrtNodeComputeInfo** nodes, ort::OrtNode**
) noexcept {
    return ort::guarded([&] {
        std::vector<std::unique_ptr<CompiledNode>> compiled;
        for (std::size_t i = 0; i < count; ++i) {
            compiled.emplace_back(static_cast<CompiledNode*>(from(self).compile(graphs[i], fused[i])));
        }
        for (std::size_t i = 0; i < count; ++i) {
            nodes[i] = compiled[i].release();
        }
    });
}

void Provider::release_nodes(ort::OrtEp* self, ort::OrtNodeComputeInfo** nodes, std::size_t count) noexcept {
    from(self).device_.settle(); // before their weights go
    for (std::size_t i = 0; i < count; ++i) {
        delete static_cast<CompiledNode*>(nodes[i]);
    }
}

ort::OrtStatus* Provider::on_run_start(ort::OrtEp* self, const ort::OrtRunOptions*) noexcept {
    return ort::guarded([&] { from(self).require_capability(); });
}

ort::OrtStatus*
Provider::create_allocator(ort::OrtEp* self, const ort::OrtMemoryInfo*, ort::OrtAllocator** allocator) noexcept {
    return ort::guarded([&] { *allocator = new Allocator(from(self).device_, true); });
}

ort::OrtStatus*
Provider::create_stream(ort::OrtEp* self, const ort::OrtMemoryDevice*, ort::OrtSyncStreamImpl** stream) noexcept {
    return ort::guarded([&] { *stream = new Stream(from(self).device_); });
}

ort::OrtStatus* Provider::get_kernel_registry(ort::OrtEp*, const ort::OrtKernelRegistry** registry) noexcept {
    return ort::guarded([&] { *registry = memcpy_kernels(); });
}

// What runs share is not changed by them; every run has a stream of its own.
ort::OrtStatus* Provider::is_concurrent_run_supported(ort::OrtEp*, bool* supported) noexcept {
    *supported = true;
    return nullptr;
}

ort::OrtStatus* Provider::sync(ort::OrtEp* self) noexcept {
    return ort::guarded([&] { from(self).device_.synchronise(); });
}

} // namespace ep
