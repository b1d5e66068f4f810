#include "metal_standin/source_line.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstdio>

namespace ds4::standin {

namespace {

struct Module {
  uintptr_t begin = 0, end = 0, base = 0;
};

int widen(dl_phdr_info* info, size_t, void* data) {
  auto& m = *static_cast<Module*>(data);
  const auto self = reinterpret_cast<uintptr_t>(&widen);
  uintptr_t begin = ~uintptr_t{0}, end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& h = info->dlpi_phdr[i];
    if (h.p_type != PT_LOAD) continue;
    begin = begin < info->dlpi_addr + h.p_vaddr ? begin : info->dlpi_addr + h.p_vaddr;
    end = end > info->dlpi_addr + h.p_vaddr + h.p_memsz ? end : info->dlpi_addr + h.p_vaddr + h.p_memsz;
  }
  if (self < begin || self >= end) return 0;
  m = {begin, end, static_cast<uintptr_t>(info->dlpi_addr)};
  return 1;
}

const Module& this_module() {
  static const Module module = [] {
    Module m;
    dl_iterate_phdr(widen, &m);
    return m;
  }();
  return module;
}

}  // namespace

bool in_this_module(const void* address) {
  const auto a = reinterpret_cast<uintptr_t>(address);
  return a >= this_module().begin && a < this_module().end;
}

std::string source_line(const void* code) {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&in_this_module), &info) == 0 || info.dli_fname == nullptr) return "";
  const std::string file = info.dli_fname;
  if (file.find('\'') != std::string::npos) return "";
  char command[64];
  std::snprintf(command, sizeof command, "' 0x%lx 2>/dev/null", static_cast<unsigned long>(reinterpret_cast<uintptr_t>(code) - 1 - this_module().base));
  FILE* pipe = popen(("addr2line -e '" + file + command).c_str(), "r");
  if (pipe == nullptr) return "";
  char line[512] = "";
  const bool got = std::fgets(line, sizeof line, pipe) != nullptr;
  pclose(pipe);
  std::string text = got ? line : "";
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const size_t note = text.find(" (");
  if (note != std::string::npos) text.resize(note);
  if (text.empty() || text[0] == '?' || text.back() == '?' || (text.size() > 1 && text.compare(text.size() - 2, 2, ":0") == 0)) return "";
  const size_t folder = text.rfind('/', text.rfind('/') - 1);
  return "at " + (folder == std::string::npos ? text : text.substr(folder + 1));
}

}  // namespace ds4::standin
