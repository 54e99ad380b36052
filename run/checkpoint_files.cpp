// llm.c's model files and our training state.
//
// A state file is a text head, followed by the optimizer's arrays. The head consists of these
// lines, in this order, and ends with an empty one:
//
//   gpt2 training state, version 2
//   identity model: L=12 NH=12 …        what must be the same to resume, one line for each field
//   recipe -l: 0.0003                   what may be changed on purpose
//   step: 1000                          and the other counters
//   optimizer bytes: 995807232          m and v, in bf16 also the fp32 master weights, in the order
//                                       of the parameters
//   checksum: 0123456789abcdef          of the head up to this line, and of the bytes
//
#include "run/checkpoint_files.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "checkpoints are written as they are in memory");

// -------------------------------------------------------------------------------------------------
// llm.c's model files

size_t Config::num_parameters() const {
    const size_t c = static_cast<size_t>(C);
    const size_t norm = 2 * c;
    const size_t qkv = 3 * c * c + 3 * c;
    const size_t attproj = c * c + c;
    const size_t fc = 4 * c * c + 4 * c;
    const size_t fcproj = 4 * c * c + c;
    return (Vp + max_T) * c + L * (norm + qkv + attproj + norm + fc + fcproj) + norm;
}

namespace {

// The int32 of the header, in their order.
enum ModelHeaderField {
    kFieldMagic,
    kFieldVersion,
    kFieldMaxT,
    kFieldV,
    kFieldL,
    kFieldNH,
    kFieldC,
    kFieldVp,
};

}  // namespace

constexpr int kVersionF32 = 3;
constexpr int kVersionBf16 = 5;
constexpr char kGetAgain[] = "get the file again";

// " at offset 8", in bytes, for messages.
static std::string at_offset(ModelHeaderField field) {
    return format(" at offset %zu", field * sizeof(int32_t));
}

// Throws an Error if a size is far above that of any GPT-2, so that what is computed from the sizes
// of a damaged header cannot overflow.
static void check_sizes(const std::string& path, const Config& c) {
    const struct {
        const char* name;
        ModelHeaderField field;
        int value;
        int low;
        int high;
    } sizes[] = {
        {"maxT", kFieldMaxT, c.max_T, 1, 1 << 24},
        {"vocabulary", kFieldV, c.V, 1, 1 << 24},
        {"layers", kFieldL, c.L, 1, 1 << 12},
        {"heads", kFieldNH, c.NH, 1, 1 << 12},
        {"channels", kFieldC, c.C, 1, 1 << 18},
        {"padded vocabulary", kFieldVp, c.Vp, c.V, 1 << 24},
    };
    for (const auto& size : sizes)
        if (size.value < size.low || size.value > size.high)
            refuse(path, std::string("damaged header: ") + size.name + at_offset(size.field),
                   format("%d..%d", size.low, size.high), size.value, kGetAgain);
    if (c.C % c.NH != 0)
        refuse(path, "damaged header: channels" + at_offset(kFieldC),
               format("a multiple of %d heads", c.NH), c.C, kGetAgain);
}

ModelHeader read_model_header(const std::string& path) {
    const InputFile file(path);
    int32_t h[kHeaderInts];
    file.read(0, h, kHeaderBytes);
    const int magic = h[kFieldMagic];
    const int version = h[kFieldVersion];
    constexpr char kOtherModel[] = "give a model_….bin of this program or of a current llm.c";
    if (magic != kModelMagic)
        refuse(path, "wrong magic" + at_offset(kFieldMagic), kModelMagic, magic, kOtherModel);
    if (version != kVersionF32 && version != kVersionBf16)
        refuse(path, "wrong version" + at_offset(kFieldVersion), "3 (fp32) or 5 (bf16)", version,
               kOtherModel);

    const Config config = {.max_T = h[kFieldMaxT],
                           .V = h[kFieldV],
                           .Vp = h[kFieldVp],
                           .L = h[kFieldL],
                           .NH = h[kFieldNH],
                           .C = h[kFieldC]};
    check_sizes(path, config);
    const ModelHeader header = {.dtype = version == kVersionF32 ? DType::f32 : DType::bf16,
                                .config = config};
    const size_t expected = kHeaderBytes + header.bytes();
    if (file.size != expected)
        refuse(path, file.size < expected ? "truncated" : "too long",
               format("%zu bytes (%s)", expected, description(header).c_str()), file.size,
               kGetAgain);
    return header;
}

void write_model(const std::string& path, const ModelHeader& header, const void* parameters) {
    const Config& c = header.config;
    int32_t h[kHeaderInts] = {};
    h[kFieldMagic] = kModelMagic;
    h[kFieldVersion] = header.dtype == DType::f32 ? kVersionF32 : kVersionBf16;
    h[kFieldMaxT] = c.max_T;
    h[kFieldV] = c.V;
    h[kFieldL] = c.L;
    h[kFieldNH] = c.NH;
    h[kFieldC] = c.C;
    h[kFieldVp] = c.Vp;
    write_whole_file(path, {{h, kHeaderBytes}, {parameters, header.bytes()}});
}

std::string description(const ModelHeader& header) {
    const Config& c = header.config;
    return format("%s, L=%d NH=%d C=%d V=%d", name_of(header.dtype), c.L, c.NH, c.C, c.V);
}

// -------------------------------------------------------------------------------------------------
// Training state

namespace {

const std::string kStateTitle = "gpt2 training state, version ";
constexpr int kStateVersion = 2;
constexpr char kVersion1Magic[] = "gpt2stat";  // the format before this one
constexpr size_t kMostHeadBytes = 1 << 16;
constexpr char kChecksumLine[] = "\nchecksum: ";  // starts with the end of the line before it
constexpr char kResumeFromAnother[] =
    "remove it and its model to resume from the previous checkpoint";
constexpr char kOtherProgram[] = "resume with the version of the program that wrote it";

std::string line(const std::string& name, const std::string& value) {
    return name + ": " + value + "\n";
}

// The checksum of a head and of the bytes behind it, which the caller adds.
Checksum64 checksum_of(const std::string& head, size_t bytes) {
    return Checksum64(bytes, checksum64(head.data(), head.size()));
}

// The counters by name: one table for both writing and reading.
struct NamedCounter {
    const char* name;
    uint64_t* value;
};
std::vector<NamedCounter> named(Counters& counters) {
    return {{"step", &counters.step},
            {"model checksum", &counters.model_checksum},
            {"epoch", &counters.data.epoch},
            {"window", &counters.data.window},
            {"batches", &counters.data.batches}};
}

// The head of a state file.
struct Head {
    std::map<std::string, std::string> values;  // by name
    std::string text;                           // the part that the checksum covers
    std::string checksum;
    size_t bytes = 0;  // including the empty line

    uint64_t number(const std::string& path, const std::string& name) const {
        const auto found = values.find(name);
        const std::string value = found == values.end() ? "nothing" : found->second;
        if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos)
            refuse(path, "damaged header: " + name, "a number", value, kResumeFromAnother);
        return std::strtoull(value.c_str(), nullptr, 10);
    }
};

Head read_head(const InputFile& file) {
    std::string text(std::min<size_t>(file.size, kMostHeadBytes), '\0');
    file.read(0, text.data(), text.size());
    if (text.starts_with(kVersion1Magic))
        refuse(file.path, "wrong version at offset 8", kStateVersion, "1", kOtherProgram);
    if (!text.starts_with(kStateTitle))
        refuse(file.path, "wrong magic at offset 0", kStateTitle, "something else",
               kResumeFromAnother);
    const int version = std::atoi(text.c_str() + kStateTitle.size());
    if (version != kStateVersion)
        refuse(file.path, format("wrong version at offset %zu", kStateTitle.size()), kStateVersion,
               version, kOtherProgram);

    // The head ends with "\nchecksum: 0123456789abcdef\n\n".
    const size_t digits_end = text.find("\n\n");
    const size_t checksum_line = text.rfind(kChecksumLine, digits_end);
    if (digits_end == std::string::npos || checksum_line == std::string::npos)
        refuse(file.path, "truncated or damaged",
               "a header that ends with a checksum and an empty line", "none", kResumeFromAnother);
    const size_t digits = checksum_line + std::strlen(kChecksumLine);
    const size_t text_end = checksum_line + 1;  // after the line end with which it starts

    Head head;
    head.bytes = digits_end + std::strlen("\n\n");
    head.text = text.substr(0, text_end);
    head.checksum = text.substr(digits, digits_end - digits);
    std::istringstream lines(head.text);
    for (std::string each; std::getline(lines, each);) {
        const size_t colon = each.find(": ");  // the title has none
        if (colon != std::string::npos)
            head.values[each.substr(0, colon)] = each.substr(colon + 2);
    }
    return head;
}

// Calls f(name, stored, mine) for each field whose value in the head, `stored`, is not this run's,
// `mine`. In the head the fields' names follow `prefix` ("identity ", "recipe "). `implied` has
// values for fields that the head may lack. Other than that, a field that only one of the two has
// is a difference, too: to "nothing".
template <class F>
void for_each_difference(const Head& head, const std::string& prefix, const Fields& my_fields,
                         const Fields& implied, F f) {
    std::map<std::string, std::string> stored_fields;
    for (const auto& [name, value] : head.values)
        if (name.starts_with(prefix))
            stored_fields[name.substr(prefix.size())] = value;
    for (const auto& [name, value] : implied)
        stored_fields.emplace(name, value);  // does nothing if the head has the field

    for (const auto& [name, mine] : my_fields) {
        const auto found = stored_fields.find(name);
        const std::string stored = found == stored_fields.end() ? "nothing" : found->second;
        if (stored != mine)
            f(name, stored, mine);
        stored_fields.erase(name);
    }
    // What is left, this run does not have.
    for (const auto& [name, stored] : stored_fields)
        f(name, stored, "nothing");
}

}  // namespace

void write_state(const std::string& path, const Identity& identity, const Counters& counters,
                 Block optimizer) {
    std::string head = kStateTitle + std::to_string(kStateVersion) + "\n";
    for (const auto& [name, value] : identity.fields)
        head += line("identity " + name, value);
    for (const auto& [name, value] : identity.recipe)
        head += line("recipe " + name, value);
    Counters copy = counters;
    for (const auto& [name, value] : named(copy))
        head += line(name, std::to_string(*value));
    head += line("optimizer bytes", std::to_string(optimizer.bytes));

    Checksum64 checksum = checksum_of(head, optimizer.bytes);
    checksum.add(optimizer.data, optimizer.bytes);
    head += line("checksum", hex(checksum.value())) + "\n";
    write_whole_file(path, {{head.data(), head.size()}, optimizer});
}

StateFile::StateFile(const std::string& path, const Identity& identity, size_t optimizer_bytes)
    : file(path) {
    const Head head = read_head(file);
    const size_t stored_bytes = head.number(path, "optimizer bytes");
    const size_t expected_size = head.bytes + stored_bytes;
    if (file.size != expected_size)
        refuse(path, file.size < expected_size ? "truncated" : "too long",
               format("%zu bytes", expected_size), file.size, kResumeFromAnother);
    begin = head.bytes;
    expected_ = head.checksum;
    checksum_ = checksum_of(head.text, stored_bytes);
    for (const auto& [name, value] : named(counters))
        *value = head.number(path, name);

    // A difference may also come from a damaged head. Then check_whole_file() says so.
    for_each_difference(
        head, "identity ", identity.fields, identity.implied,
        [&](const std::string& name, const std::string& stored, const std::string& mine) {
            check_whole_file();
            throw Error(format(
                "%s: the checkpoint and this run have different settings: %s is \"%s\" in the "
                "checkpoint, but \"%s\" in this run; resume with the same settings, or give "
                "another -o",
                path.c_str(), name.c_str(), stored.c_str(), mine.c_str()));
        });
    if (stored_bytes != optimizer_bytes) {
        check_whole_file();
        refuse(path, "wrong size of the optimizer state", format("%zu bytes", optimizer_bytes),
               stored_bytes, "resume with the same settings");
    }
    for_each_difference(
        head, "recipe ", identity.recipe, {},
        [&](const std::string& name, const std::string& stored, const std::string& mine) {
            recipe_changes += recipe_changes.empty() ? "" : ", ";
            recipe_changes += name + " from " + stored + " to " + mine;
        });
}

void StateFile::check() const {
    const std::string found = hex(checksum_.value());
    if (found != expected_)
        refuse(file.path, "damaged", expected_, found, kResumeFromAnother);
}

void StateFile::check_whole_file() {
    std::vector<char> piece(1 << 20);
    for (size_t at = begin; at < file.size; at += piece.size()) {
        const size_t bytes = std::min<size_t>(piece.size(), file.size - at);
        file.read(at, piece.data(), bytes);
        add(piece.data(), bytes);
    }
    check();
}

// -------------------------------------------------------------------------------------------------
// The checkpoints of a run

std::string model_path(const std::string& dir, int step) {
    return format("%s/model_%08d.bin", dir.c_str(), step);
}

std::string state_path(const std::string& dir, int step) {
    return dir + "/" + state_name(step);
}

std::string state_name(int step) {
    return format("state_%08d.bin", step);
}

namespace {

// The files of a run in its output directory.
struct RunFiles {
    std::set<int> models;                  // steps
    std::set<int> states;                  // steps
    std::vector<std::string> temporaries;  // paths; killed runs leave them

    bool has_model(int step) const { return models.count(step) > 0; }
    bool has_state(int step) const { return states.count(step) > 0; }
    int newest_model() const { return models.empty() ? -1 : *models.rbegin(); }
    int states_newer_than_all_models() const {
        return static_cast<int>(std::distance(states.upper_bound(newest_model()), states.end()));
    }
};

// Recognises the files by their names. There are none if there is no such directory.
RunFiles list_run_files(const std::string& dir) {
    static const std::regex pattern(
        "(?:(model|state)_([0-9]{8}|[1-9][0-9]{8,9})[.]bin|log[.]jsonl)([.]tmp[.][0-9]+)?");
    RunFiles files;
    std::error_code error;
    std::filesystem::directory_iterator entry(dir, error);
    if (error == std::errc::no_such_file_or_directory)
        return files;
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
        const std::string name = entry->path().filename();
        std::smatch match;
        if (!std::regex_match(name, match, pattern))
            continue;
        const std::string kind = match[1];
        const long long step = match[2].matched ? std::stoll(match[2]) : 0;
        const bool is_temporary = match[3].matched;
        if (step > INT_MAX)
            continue;
        if (is_temporary) {
            files.temporaries.push_back(entry->path());
            continue;
        }
        check_regular(entry->path());
        if (kind == "model")
            files.models.insert(static_cast<int>(step));
        if (kind == "state")
            files.states.insert(static_cast<int>(step));
    }
    if (error)
        throw file_error(dir, "list the directory", error.value());
    return files;
}

void remove_file(const std::string& path) {
    if (uninterrupted([&] { return unlink(path.c_str()); }) && errno != ENOENT)
        throw file_error(path, "remove", errno);
}

}  // namespace

int newest_model(const std::string& dir) {
    return list_run_files(dir).newest_model();
}

int checkpoint_to_resume(const std::string& dir) {
    const RunFiles files = list_run_files(dir);
    if (files.has_state(files.newest_model()))
        return files.newest_model();

    std::string without_state;  // the newest models
    for (auto step = files.models.rbegin(); step != files.models.rend(); ++step) {
        if (files.has_state(*step))
            break;
        without_state += (without_state.empty() ? "" : ", ") + model_path(dir, *step);
    }
    if (!without_state.empty())
        throw Error(format(
            "%s: the training state that -y needs (such as %s) is missing; restore it, move these "
            "models elsewhere, or start from one of them with -e and another -o",
            without_state.c_str(), state_name(files.newest_model()).c_str()));
    // A run that is killed before its first model leaves one state. More of them belong to models
    // that somebody has moved.
    if (files.models.empty() && files.states.size() > 1)
        throw Error(format(
            "%s: has %zu training states but no model; restore the models, or give another -o",
            dir.c_str(), files.states.size()));
    return -1;
}

void remove_leftovers(const std::string& dir) {
    const RunFiles files = list_run_files(dir);
    for (const std::string& path : files.temporaries)
        remove_file(path);
    // A run that is killed between the two files of a checkpoint leaves a single state.
    const bool of_a_killed_run = files.states_newer_than_all_models() == 1;
    for (const int step : files.states) {
        if (files.has_model(step))
            continue;
        const std::string path = state_path(dir, step);
        if (of_a_killed_run && step > files.newest_model())
            remove_file(path);
        else
            print_error(
                format("warning: %s: the model that belongs to this training state is missing; the "
                       "state is kept",
                       path.c_str()));
    }
}

void prune_checkpoints(const std::string& dir, int keep, int keep_every) {
    if (keep == 0)
        return;
    const RunFiles files = list_run_files(dir);
    std::vector<int> steps;  // newest first
    for (auto step = files.models.rbegin(); step != files.models.rend(); ++step)
        if (files.has_state(*step))
            steps.push_back(*step);
    for (size_t i = keep; i < steps.size(); i++) {
        if (keep_every > 0 && steps[i] % keep_every == 0)
            continue;
        // The model goes first, because a checkpoint counts as complete while its model exists. If
        // this is interrupted between the two, the state is left, and remove_leftovers() names it.
        remove_file(model_path(dir, steps[i]));
        remove_file(state_path(dir, steps[i]));
    }
}
