// Records a program's timeline without Nsight Systems. CUPTI reports kernels, copies and NVTX ranges from
// cudaProfilerStart to the program's end. The output is JSON for https://ui.perfetto.dev. CUDA loads this library into
// the program if CUDA_INJECTION64_PATH names it:
//
//   make dev/trace.so && CUDA_INJECTION64_PATH=dev/trace.so ./train_gpt2cu --profile 1 -v 0 -s 0
//
// Writes: trace.<process>.json in the current folder, or $TRACE.<process>.json, one file a process. Times are
// microseconds of one clock for all processes of a machine. A stream whose kernels overlap gets a second line, because
// the viewer wants that. An error never ends the program. It is printed on stderr.
#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#if CUPTI_API_VERSION < 130000
#error "dev/trace.cpp needs the CUPTI of CUDA 13 or later"
#endif

namespace {

constexpr uint32_t kNoGpu = UINT32_MAX;
struct Event {
    std::string name;
    const char* kind;
    uint64_t start, end;   // ns
    uint32_t gpu, stream;  // a range has kNoGpu and its thread
    uint32_t correlation;  // ties it to the call that launched it
};
struct Call {
    uint64_t start;
    uint32_t thread;
};

std::mutex mutex;
std::vector<Event> events;
std::map<uint32_t, Event> open_ranges;  // by marker
std::map<uint32_t, Call> calls;         // by correlation
std::atomic<bool> started;
size_t dropped = 0;

bool good(CUptiResult status, const char* what) {
    if (status == CUPTI_SUCCESS) return true;
    const char* text = "?";
    cuptiGetResultString(status, &text);
    std::fprintf(stderr, "trace.so: %s: %s\n", what, text);
    return false;
}

// void (anonymous namespace)::backward_kernel<64, true>(Args) → backward_kernel<64, true>
std::string short_name(const char* mangled) {
    int status = 0;
    char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    std::string name = demangled ? demangled : mangled ? mangled : "?";
    std::free(demangled);
    for (const std::string& drop : {std::string("void "), std::string("(anonymous namespace)::")})
        for (size_t at; (at = name.find(drop)) != std::string::npos;) name.erase(at, drop.size());
    return name.substr(0, name.find('('));
}

// Work on the GPU, whose name is name_of(record).
template <class Record, class Name>
void add(const CUpti_Activity* record, const char* kind, Name name_of) {
    const Record& r = *reinterpret_cast<const Record*>(record);
    events.push_back({name_of(r), kind, r.start, r.end, r.deviceId, r.streamId, r.correlationId});
}

void read(CUpti_Activity* record) {
    const auto bytes = [](auto& r) { return std::to_string(r.bytes) + " bytes"; };
    switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
            return add<CUpti_ActivityKernel10>(record, "kernel", [](auto& r) { return short_name(r.name); });
        case CUPTI_ACTIVITY_KIND_MEMCPY:
            return add<CUpti_ActivityMemcpy6>(record, "copy", [&](auto& r) { return "copy " + bytes(r); });
        case CUPTI_ACTIVITY_KIND_MEMCPY2:
            return add<CUpti_ActivityMemcpyPtoP4>(record, "copy",
                                                  [&](auto& r) { return "copy " + bytes(r) + " to another GPU"; });
        case CUPTI_ACTIVITY_KIND_MEMSET:
            return add<CUpti_ActivityMemset4>(record, "set", [&](auto& r) { return "set " + bytes(r); });
        case CUPTI_ACTIVITY_KIND_RUNTIME:
        case CUPTI_ACTIVITY_KIND_DRIVER: {
            const auto* r = reinterpret_cast<CUpti_ActivityAPI*>(record);
            calls[r->correlationId] = {r->start, r->threadId};
            return;
        }
        case CUPTI_ACTIVITY_KIND_MARKER: {
            const auto* r = reinterpret_cast<CUpti_ActivityMarker2*>(record);
            if (r->flags & CUPTI_ACTIVITY_FLAG_MARKER_START) {
                open_ranges[r->id] = {r->name ? r->name : "?", "range", r->timestamp, 0, kNoGpu,
                                      r->objectId.pt.threadId, 0};
            } else if (const auto range = open_ranges.find(r->id);
                       (r->flags & CUPTI_ACTIVITY_FLAG_MARKER_END) && range != open_ranges.end()) {
                range->second.end = r->timestamp;
                events.push_back(range->second);
                open_ranges.erase(range);
            }
            return;
        }
        default:
            return;
    }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* max_records) {
    *size = 1 << 20, *max_records = 0;
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
}
void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t, size_t valid) {
    const std::lock_guard<std::mutex> lock(mutex);
    size_t lost = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &lost) == CUPTI_SUCCESS) dropped += lost;
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) read(record);
    std::free(buffer);
}

void CUPTIAPI on_call(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void* data) {
    if (static_cast<const CUpti_CallbackData*>(data)->callbackSite != CUPTI_API_EXIT) return;
    started = true;
    for (const CUpti_ActivityKind kind :
         {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
          CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_MARKER, CUPTI_ACTIVITY_KIND_RUNTIME,
          CUPTI_ACTIVITY_KIND_DRIVER})
        good(cuptiActivityEnable(kind), "cuptiActivityEnable");
}

std::string quoted(const std::string& text) {
    std::string q = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') q += '\\';
        q += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    return q + '"';
}

// The ranges in which the work was launched, outermost first.
std::string ranges_of(const Event& event, const std::vector<const Event*>& ranges) {
    const auto call = calls.find(event.correlation);
    if (call == calls.end()) return "";
    std::string path;
    for (const Event* range : ranges)
        if (range->stream == call->second.thread && range->start <= call->second.start &&
            call->second.start < range->end)
            path += (path.empty() ? "" : " / ") + range->name;
    return path;
}

void write_trace() {
    good(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
    const std::lock_guard<std::mutex> lock(mutex);
    if (dropped) std::fprintf(stderr, "trace.so: CUPTI lost %zu records: the timeline has gaps\n", dropped);
    if (events.empty()) {
        std::fprintf(stderr, "trace.so: nothing to write: %s\n",
                     started ? "nothing was recorded" : "the program never called cudaProfilerStart (--profile N)");
        return;
    }
    std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
        return a.start != b.start ? a.start < b.start : a.end > b.end;  // an outer range comes first
    });
    const char* prefix = std::getenv("TRACE");
    const std::string path = std::string(prefix ? prefix : "trace") + "." + std::to_string(getpid()) + ".json";
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (!file) return std::perror(path.c_str());
    std::fprintf(file, "{\"traceEvents\": [");
    const char* separator = "\n";
    std::vector<const Event*> ranges;
    for (const Event& event : events)
        if (event.gpu == kNoGpu) ranges.push_back(&event);
    std::map<std::pair<uint32_t, uint32_t>, std::vector<uint64_t>> ends;  // of (gpu, stream)'s lines
    constexpr uint64_t kOrigin = 1'000'000'000'000'000;                   // beyond this a double loses the ns
    for (const Event& event : events) {
        const bool range = event.gpu == kNoGpu;
        std::string line = (range ? "thread " : "stream ") + std::to_string(event.stream);
        if (!range) {
            std::vector<uint64_t>& lines = ends[{event.gpu, event.stream}];
            size_t place = 0;
            while (place < lines.size() && lines[place] > event.start) place++;
            if (place > 0) line += ", " + std::to_string(place + 1);
            lines.resize(std::max(lines.size(), place + 1));
            lines[place] = event.end;
        }
        std::fprintf(file,
                     "%s{\"name\": %s, \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %d, \"tid\": \"%s\", \"ts\": %.3f, "
                     "\"dur\": %.3f, \"args\": {\"gpu\": %d, \"range\": %s}}",
                     separator, quoted(event.name).c_str(), event.kind, int(getpid()), line.c_str(),
                     event.start % kOrigin * 1e-3, (event.end - event.start) * 1e-3, range ? -1 : int(event.gpu),
                     range ? "\"\"" : quoted(ranges_of(event, ranges)).c_str());
        separator = ",\n";
    }
    std::fprintf(file, "\n]}\n");
    if (std::fclose(file)) return std::perror(path.c_str());
    std::fprintf(stderr, "%s: open it at https://ui.perfetto.dev\n", path.c_str());
}

}  // namespace

// The process's first CUDA call comes here.
extern "C" int InitializeInjection() {
    Dl_info cupti;
    if (dladdr(reinterpret_cast<void*>(cuptiSubscribe), &cupti))
        setenv("NVTX_INJECTION64_PATH", cupti.dli_fname, 0);  // tells NVTX who records its ranges
    CUpti_SubscriberHandle subscriber;
    if (good(cuptiSubscribe(&subscriber, on_call, nullptr), "cuptiSubscribe") &&
        good(cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuProfilerStart),
             "cuptiEnableCallback") &&
        good(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "cuptiActivityRegisterCallbacks"))
        std::atexit(write_trace);
    return 1;
}
