# The kernels of metal/, translated and compiled twice: for speed, and with every access checked; and their runtime.
file(GLOB ds4_metal_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/metal/*.metal)
file(GLOB ds4_metal_headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/metal/*.h)
# Kernels of the tests of the stand-in itself, right ones and ones with planted faults.
file(GLOB probes CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/standin/kernels/*.metal)
file(GLOB probe_headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/standin/kernels/*.h)
list(APPEND ds4_metal_files ${probes})
list(APPEND ds4_metal_headers ${probe_headers})
set(generated ${CMAKE_BINARY_DIR}/metal)
set(kernel_sources)
foreach(file ${ds4_metal_files})
  get_filename_component(family ${file} NAME_WE)
  list(APPEND kernel_sources ${generated}/${family}.cpp)
endforeach()
add_custom_command(
  OUTPUT ${generated}/stamp
  BYPRODUCTS ${kernel_sources} ${generated}/registry.cpp ${generated}/sources.cpp
  COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/metal/generate.py ${generated} ${ds4_metal_files}
  COMMAND ${CMAKE_COMMAND} -E touch ${generated}/stamp
  DEPENDS ${ds4_metal_files} ${ds4_metal_headers} ${CMAKE_SOURCE_DIR}/metal/generate.py
  COMMENT "Translating the Metal kernels" VERBATIM)
add_custom_target(ds4_metal_generate DEPENDS ${generated}/stamp)

set(isa)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(isa -mavx2 -mfma -mf16c)
endif()
set(kernel_flags -O2 ${isa} -fno-strict-aliasing -fno-exceptions -fsigned-char -Wno-unused-parameter -Wno-unused-variable -Wno-unused-const-variable)
set(kernel_objects)
set(has_checked 1)
if(DS4_SANITIZE)
  set(has_checked 0)  # two kinds of instrumentation do not mix
endif()
set(variants fast)
if(has_checked)
  list(APPEND variants checked)
endif()
foreach(variant ${variants})
  foreach(file ${ds4_metal_files})
    get_filename_component(family ${file} NAME_WE)
    set(target ds4_kernels_${family}_${variant})
    add_library(${target} OBJECT ${generated}/${family}.cpp)
    add_dependencies(${target} ds4_metal_generate)
    target_link_libraries(${target} PRIVATE ds4_flags)
    target_compile_definitions(${target} PRIVATE DS4_FAMILY=k_${family}_${variant})
    target_compile_options(${target} PRIVATE ${kernel_flags})
    if(variant STREQUAL checked)
      # The instrumentation of the thread sanitizer with handlers of our own (shadow.cpp); its runtime is not linked.
      target_compile_definitions(${target} PRIVATE DS4_STANDIN_CHECKED=1)
      # -O1: above it gcc turns loops into calls of memset and memcpy, which nobody would see.
      target_compile_options(${target} PRIVATE -O1 -g1 -gdwarf-4 -fno-builtin-memset -fno-builtin-memcpy -fsanitize=thread)
    endif()
    list(APPEND kernel_objects $<TARGET_OBJECTS:${target}>)
  endforeach()
endforeach()

file(GLOB standin_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/metal_standin/*.cpp)
add_library(ds4_standin STATIC ${standin_sources} ${generated}/registry.cpp ${generated}/sources.cpp ${kernel_objects})
add_dependencies(ds4_standin ds4_metal_generate)
target_link_libraries(ds4_standin PUBLIC ds4_core)
target_include_directories(ds4_standin PUBLIC ${CMAKE_SOURCE_DIR}/csrc/metal_standin/include)
target_compile_definitions(ds4_standin PUBLIC DS4_STANDIN=1 PRIVATE DS4_STANDIN_HAS_CHECKED=${has_checked})
